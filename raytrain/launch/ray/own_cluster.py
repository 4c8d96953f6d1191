"""A Ray cluster on this machine that belongs to one process: started for it, and ended with it."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from raytrain.errors import UsageError, format_count
from raytrain.launch.ray.fork_client import worker_program
from raytrain.launch.ray.private_api import SMALL_HEAD, can_fork, loopback_environment, no_agent, variables_set
from raytrain.loader.machine import cores

_LEFT_OUT = "rfc3987_syntax"  # a package that Ray imports and never uses
_STAND_INS = Path(__file__).with_name("stand_ins")


def lean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for Ray's processes, with a stand-in for the package ``_LEFT_OUT``.

    Importing the package takes long; importing the stand-in fails at once, which Ray allows.
    """
    path = os.pathsep.join(filter(None, [str(_STAND_INS), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


@contextmanager
def lean_imports() -> Iterator[None]:
    """Keep this process from importing the package ``_LEFT_OUT`` in this context, unless it is imported already."""
    modules: dict[str, Any] = sys.modules
    is_left_out = modules.setdefault(_LEFT_OUT, None) is None  # None in place of a module makes its import fail
    try:
        yield
    finally:
        if is_left_out:
            modules.pop(_LEFT_OUT, None)


# These switch off parts of Ray that a one-machine cluster without a dashboard does not use, which saves seconds of its
# start. The driver reads them, too, when it starts a run: usage statistics would be a thread that outlives the run.
WITHOUT_EXTRAS = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_CLUSTER_VARIABLES = {
    **WITHOUT_EXTRAS,
    # Processes would report tasks and metrics every few seconds, which nobody reads here.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # otherwise what a loop prints is in both logs of its worker
    # If actors use all CPUs, Ray ends idle processes after a second by default; those that read take seconds to start.
    "RAY_idle_worker_killing_time_threshold_ms": "60000",
    # The first processes wait until the fork server has imported what they need.
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_prestart_worker_first_driver": "0",  # otherwise the driver waits for these processes
    # Ray Serve kills its process for HTTP that is not ready after three times so many seconds, by default 5. On a busy
    # machine, its imports take longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}

TOO_SLOW = "timed out during startup"  # Ray gives its processes 30 s, which can be too little on a busy machine
_NUM_TRIES = 3
_MAX_FOLDER = 39  # bytes of the folder's path; the paths of Ray's sockets in it must not exceed 107
_LOG_BYTES = 10_000_000  # of room for the logs of a run's processes
_HEADS_PROCESSES = {  # the others end with the first one
    "gcs_server": "Ray's head on this machine, the gcs_server,",
    "raylet": "Ray's process on this machine, the raylet,",
}
_OPEN_FILES = 65536  # what Ray asks for; many systems allow a process 1024 if it does not ask


class LocalCluster:
    """A local cluster that is starting, or runs, in a process of its own with the variables of ``environment``, too.

    Until it is closed, this process has the variables that a driver of the cluster needs. If this process dies, the
    cluster ends with it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Ray would make its sockets in a folder of TMPDIR, where their paths may be too long.
        is_long = len(os.fsencode(os.environ.get("TMPDIR", ""))) > _MAX_FOLDER
        short_folder = {"RAY_TMPDIR": "/tmp"} if is_long and "RAY_TMPDIR" not in os.environ else {}
        self.log_folder = temporary_folder({**os.environ, **short_folder, **environment})
        check_room_for_logs(self.log_folder)

        self._opened = contextlib.ExitStack()
        self._opened.enter_context(variables_set({**WITHOUT_EXTRAS, **token_settings()}))
        variables = {**os.environ, **short_folder, **_CLUSTER_VARIABLES, **loopback_environment(), **environment}
        self._environment = lean(variables)
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 ; closed in close()
        self._opened.callback(self._stderr.close)
        self._process = self._start()

    def address(self) -> str:
        """Wait until the cluster is up, and return its address.

        A cluster whose processes were too slow is started again, up to three times in all. Raises UsageError with the
        reason if it could not start.
        """
        reason = ""
        for tries_left in reversed(range(_NUM_TRIES)):
            assert self._process.stdout is not None
            if line := self._process.stdout.readline().strip():
                return line
            # The process has ended without an address; the last line of its standard error says why.
            self._process.wait()
            self._stderr.seek(0)
            lines = [line.strip() for line in self._stderr if line.strip()]
            reason = lines[-1].rstrip(".") if lines else f"exit status {self._process.returncode}"
            if TOO_SLOW not in reason or not tries_left:
                break
            self._process = self._start()
        if TOO_SLOW in reason:
            load, num_cores = os.getloadavg()[0], format_count(cores(), "core")
            cause = f"while some {load:.0f} processes shared its {num_cores}; run the command again if it is less busy"
            if load <= 2 * cores():
                cause = f"and its {num_cores} are not busy, so its disk may be slow; set RAY_TMPDIR, which is "
                cause += f"{self.log_folder} now, to a folder on a faster one"
            raise UsageError(
                f"Ray could not start on this machine, in {_NUM_TRIES} tries of 30 s, {cause}, or use --backend local."
            )
        raise UsageError(f"Ray could not start a cluster on this machine ({reason}); `ray start --head` says more.")

    @property
    def runs(self) -> bool:
        """True if the process that keeps the cluster runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the cluster, wait until its processes are gone, and restore this process's variables."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("end")
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._opened.close()

    def _start(self) -> subprocess.Popen[str]:
        """Start the process that starts the cluster, and ends it when its standard input ends.

        It runs :func:`run_until_input_ends`.
        """
        # It can say in the terminal why this process has ended.
        try:
            terminal = os.dup(2)
        except OSError:  # standard error is closed
            terminal = os.open(os.devnull, os.O_WRONLY)
        # The process gets a session of its own, so that a Ctrl-C in the terminal reaches only the driver.
        with open(terminal, "w"):
            return subprocess.Popen(
                [sys.executable, "-m", "raytrain.launch.ray.own_cluster", str(terminal)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                start_new_session=True,
                env=self._environment,
                pass_fds=[terminal],
            )


def temporary_folder(environment: Mapping[str, str]) -> str:
    """Return the folder in which a Ray with the variables of ``environment`` makes one for its logs and sockets."""
    return environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"


def check_room_for_logs(folder: str, needed_bytes: int = _LOG_BYTES) -> None:
    """Raise UsageError if the disk of Ray's temporary folder has less than ``needed_bytes`` free.

    On a full disk, each process of Ray would end as soon as it writes its log, and Ray would start it again, for ever.
    """
    with contextlib.suppress(OSError):  # Ray makes a folder that does not exist, or says that it cannot
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise UsageError(
                f"The disk of {folder} has {free_bytes / 1e6:.1f} MB free, and Ray needs {_LOG_BYTES / 1e6:.0f} MB "
                "there for the logs of its processes; free some space, or set RAY_TMPDIR to a folder on another disk."
            )


def token_settings() -> dict[str, str]:
    """Return the variables with which a new cluster asks for a token; create the token if this user has none.

    A user who has set RAY_AUTH_MODE decides. Raises UsageError if the file of the token cannot be written.
    """
    settings = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    if settings["RAY_AUTH_MODE"] != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return settings
    # Ray reads the token from this file, which other users must not be able to read at any moment, and refuses an empty
    # one. So the file gets its name when it is complete: a command that starts at the same time may read it.
    path = Path.home() / ".ray" / "auth_token"
    try:
        if path.exists():
            return settings
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="auth_token-") as folder:
            token = Path(folder, path.name)
            token.touch(0o600)
            token.write_text(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another process was faster, and its Ray has that token
                os.link(token, path)
    except OSError as error:
        raise UsageError(
            f"The token of a Ray on this machine can't be written to {path} ({error.strerror}); set RAY_AUTH_TOKEN to "
            "a long random text, or HOME to a folder that you may write to."
        ) from None
    return settings


def start_head(program: str | None) -> str:
    """Start a cluster on this machine, which ends with this process; return its address.

    For each of its worker processes, it runs ``program``, or Ray's own if that is None. ``ray.init`` would start four
    Python processes besides, each of which takes one to four seconds of a core: a server for a dashboard (even without
    a dashboard), the dashboard's agent, one that sends logs to drivers, and an autoscaler.
    """
    api = SMALL_HEAD.find()
    if api is None:
        import ray

        ray.init(include_dashboard=False, log_to_driver=False)
        return ray.get_runtime_context().gcs_address

    # Parameters leave out the process that sends logs and the autoscaler. Only a subclass can leave out the dashboard's
    # server and its agent.
    node_class: Any
    parameters_class: Any
    node_class, parameters_class = api

    class Head(node_class):
        def start_api_server(self, **_: Any) -> None:
            """Do not start the dashboard's server."""

        def start_raylet(self, *arguments: Any, **options: Any) -> None:
            """Start the raylet without the dashboard's agent."""
            with no_agent(self.get_session_dir_path(), self._node_id):
                super().start_raylet(*arguments, **options)

    parameters = parameters_class(
        include_dashboard=False, include_log_monitor=False, no_monitor=True, worker_path=program
    )
    return Head(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True).gcs_address


def run_until_input_ends(terminal: int) -> None:
    """Start the cluster, print its address, and keep it running until standard input ends.

    The cluster ends with this process. Its processes may open as many files as Ray wants, if the system allows that. If
    a process of Ray has died, and Ray has ended the driver for that without a word, a sentence is written into the file
    descriptor ``terminal``.
    """
    # The end of standard input ends the cluster, and not a SIGINT that is sent to all processes of a command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(terminal, False)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    print(start_head(worker_program() if can_fork() else None), flush=True)
    has_closed = bool(sys.stdin.read())  # LocalCluster.close writes a word, and a driver that has died does not

    children = psutil.Process().children()
    died = [child.name() for child in children if child.status() == psutil.STATUS_ZOMBIE]
    cause = next((subject for name, subject in _HEADS_PROCESSES.items() if name in died), None)
    with open(terminal, "w", errors="replace") as output, contextlib.suppress(OSError):
        if cause and not has_closed:
            sentence = f"{cause} has died, as if for lack of memory, and has taken this command along; run it again, "
            print(f"raytrain: {sentence}with --resume if a run had begun to train.", file=output, flush=True)


if __name__ == "__main__":
    run_until_input_ends(int(sys.argv[1]))
