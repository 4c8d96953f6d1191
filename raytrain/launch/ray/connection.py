"""The Ray cluster of a command: one that runs already, or this process's own."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from raytrain.errors import UsageError
from raytrain.launch.placement import visible_gpus
from raytrain.launch.ray.fork_client import keep_server, py_executable
from raytrain.launch.ray.own_cluster import LocalCluster, lean_imports
from raytrain.launch.ray.private_api import (
    ANSWER_AT_ONCE,
    CURRENT_CLUSTER_FILE,
    LOOPBACK_ENVIRONMENT,
    can_fork,
    check_version,
    head_answers,
    in_ray,
    messages_in_log,
    set_variables,
    variables_set,
    version_error,
)
from raytrain.runs.logs import STARTUP

T = TypeVar("T")

HEAD_AWAY_S = "900"
"""How long this process does without the head of a cluster that it joins; see ``cluster/`` for the other machines."""
_HEAD_AWAY = "RAY_gcs_rpc_server_reconnect_timeout_s"
_VARIABLES = {
    # Under `uv run`, Ray would pack the current folder for its workers and start each of them through uv.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Otherwise a thread that still reads when the connection ends starts another cluster by asking for a block.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
_ANSWER_WITHIN_S = 5.0
_JOB_SETTINGS = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray passes those of `ray job submit` in a variable of this name
_SAME_PYTHON = {"env_vars", "working_dir", "py_modules", "excludes", "config"}
_LOG = logging.getLogger("raytrain")


class OwnRay:
    """The Ray that this process has started, kept for its next use by any thread, until the process ends."""

    def __init__(self, gpus: str | None) -> None:
        self.num_users = 0
        self._gpus = gpus
        self._cluster = LocalCluster(visible_gpus(gpus) if gpus else {})
        self._address: str | None = None
        self._opened = ExitStack()
        self._opened.enter_context(keep_server())
        self._joining = threading.Lock()
        self._environment: dict[str, str] | None = None
        self._is_spoilt = False

    @property
    def is_joined(self) -> bool:
        """Whether this process is in it, and not in another cluster since."""
        if self._address is None or not in_ray():
            return False
        import ray

        return ray.get_runtime_context().gcs_address == self._address

    def fits(self, gpus: str | None) -> bool:
        """Whether it can be used as if it were started now: with these GPUs and this process's variables."""
        changed = self._environment is not None and self._environment != dict(os.environ)
        works = self._cluster.runs and (self._address is None or (self.is_joined and _is_alive()))
        return works and gpus == self._gpus and not changed

    def join(self) -> None:
        """Join it; raises UsageError if it could not start."""
        with self._joining:
            if self._address is not None:
                return
            if is_connected():
                joined = "--address is local, and this process is in a Ray cluster already"
                raise UsageError(f"{joined}; leave --address out, or call ray.shutdown() first.")
            self._address = self._cluster.address()
            self._opened.enter_context(variables_set(LOOPBACK_ENVIRONMENT))
            self._opened.enter_context(messages_in_log())
            self._is_spoilt = True  # until it is joined
            _init(self._address, None)
            self._is_spoilt = False

    def spoil(self) -> bool:
        """Have it end with this use, and the processes of a run with it; False if others use it."""
        self._is_spoilt = self.num_users == 1
        return self._is_spoilt

    def release(self) -> None:
        """End one use."""
        self.num_users -= 1
        self._environment = dict(os.environ)
        if self._is_spoilt and not self.num_users:
            end_own_ray()

    def end(self) -> None:
        """Leave it and end it."""
        if self.is_joined:  # and the user has not left it
            _leave()
        self._opened.close()
        self._cluster.close()


_own: OwnRay | None = None
_own_lock = threading.RLock()


@atexit.register
def end_own_ray() -> None:
    """End the Ray that this process has started, unless a thread still trains there: then it ends with the process."""
    global _own
    with _own_lock:
        if _own is not None and not _own.num_users:
            ended, _own = _own, None
            ended.end()


def _use_own_ray(gpus: str | None) -> OwnRay:
    """This process's Ray, which is started if there is none, or none that fits."""
    global _own
    with _own_lock:
        if _own is None or not _own.fits(gpus):
            _require_unused("start another one with other GPUs or variables")
            end_own_ray()
            _own = OwnRay(gpus)
        _own.num_users += 1
        return _own


def _require_unused(wish: str) -> None:
    if _own is not None and _own.num_users:
        raise UsageError(f"A run of this process uses the Ray that it has started; wait for its end to {wish}.")


class Connection(AbstractContextManager["Connection"]):
    """A cluster that is used while the connection is open. One that was started here stays for the next connection.

    ``address`` is that of a cluster, ``auto`` for the one that this user or root started on this machine, or ``local``
    for this process's own. By default it is the cluster that this process is in, else RAY_ADDRESS, else the one on this
    machine, else its own. ``gpus`` are the GPUs of this machine that its own one uses, such as ``0,2``; all by default.
    ``before_start`` is called before the own one is used, and may raise what speaks against it.
    """

    def __init__(
        self, address: str | None, gpus: str | None = None, before_start: Callable[[], None] | None = None
    ) -> None:
        set_variables({name: os.environ.get(name, value) for name, value in _VARIABLES.items()})
        own_is_used = _own is not None and _own.num_users > 0
        self._address = address or (None if is_connected() or own_is_used else os.environ.get("RAY_ADDRESS")) or None
        if self._address and "://" in self._address:
            raise _not_a_cluster(self._address)
        is_open = self._address == "auto" or not (self._address or is_connected() or own_is_used)
        if is_open and (found := ray_start_address()):
            self._address = found
            _LOG.warning("Joining the Ray that runs on this machine, %s; --address local starts a new one.", found)
        starts_here = self._address == "local" or not (self._address or is_connected())
        if gpus and not starts_here:
            raise UsageError(
                f"--device is cuda:{gpus}, and the run uses a Ray cluster that runs already, whose GPUs were chosen "
                "when it was started; leave the numbers out, or use --address local for a new cluster on this machine."
            )
        if not starts_here:
            # A run trains on without the cluster's head, but Ray ends its processes after a minute.
            set_variables({_HEAD_AWAY: os.environ.get(_HEAD_AWAY, HEAD_AWAY_S)})
            _require_unused(f"join the cluster at {self._address}")
            end_own_ray()
        elif before_start is not None:
            before_start()
        self.own = _use_own_ray(gpus) if starts_here else None  # this machine alone, for nobody but this process
        self._opened = ExitStack()
        self._opened.enter_context(lean_imports())
        if self.own is None:
            self._opened.enter_context(keep_server())

    def __exit__(self, *exception: object) -> None:
        self.close()

    def connect(self) -> None:
        """Join the cluster; raises :class:`UsageError` if there is none at the address."""
        if self.own is not None:
            STARTUP.info("waiting for Ray on this machine …")
            self.own.join()
            return
        if is_connected():
            check_version()
            return
        STARTUP.info("joining the Ray cluster …")
        assert self._address is not None
        _check_answers(self._address)
        self._opened.enter_context(messages_in_log())
        _init(self._address, _runtime_environment())
        self._opened.callback(_leave)

    def close(self) -> None:
        """Leave the cluster, unless it is this process's own."""
        self._opened.close()
        if self.own is not None:
            self.own.release()


def ray_start_address() -> str | None:
    """Its address, if this user, or root started it, and it answers.

    Ray writes the address into a folder that everybody may write to. Another user's cluster would run this user's code,
    and would be shown this user's token. Found without importing Ray, which takes a second.
    """
    note = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / CURRENT_CLUSTER_FILE
    with suppress(OSError, ValueError), open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        if os.fstat(file.fileno()).st_uid not in (0, os.getuid()):
            return None
        address = file.read().strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=1.0):
            return address
    return None


def uses_cluster(address: str | None) -> bool:
    """Whether there is a cluster to use, or the user asks for one; otherwise, a :class:`Connection` starts one."""
    return bool(address or is_connected() or os.environ.get("RAY_ADDRESS") or ray_start_address())


def is_connected() -> bool:
    """Whether this process is in a Ray cluster that it has not started itself."""
    return in_ray() and not (_own is not None and _own.is_joined)


def _init(address: str, runtime_environment: dict[str, str] | None) -> None:
    import ray

    check_version()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=runtime_environment)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise version_error(address, str(error)) or _no_cluster(address, str(error)) from None


def _runtime_environment() -> dict[str, str] | None:
    """That of this process's job: its processes are forked, unless the job has a Python or a container of its own."""
    job = json.loads(os.environ.get(_JOB_SETTINGS, "{}")).get("runtime_env") or {}
    command = py_executable() if job.keys() <= _SAME_PYTHON and can_fork() else None
    return None if command is None else {"py_executable": command}


def _is_alive() -> bool:
    """Whether the cluster that this process is in still works."""
    import ray

    return head_answers(_ANSWER_WITHIN_S) and any(node["Alive"] for node in ray.nodes())


def _leave() -> None:
    import ray

    with suppress(Exception):
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise UsageError if no cluster answers at ``HOST:PORT``, where Ray would try for minutes; show it our token."""
    if address == "auto":
        raise _no_cluster(address, "this user has started none on this machine with `ray start`")
    host, separator, port = address.rpartition(":")
    if not separator or "/" in address:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (ValueError, OverflowError):
        raise _no_cluster(address, f"{port} is not a port") from None
    except OSError as error:
        raise _no_cluster(address, error.strerror or "no answer within 5 seconds") from None
    from ray.exceptions import AuthenticationError, RayError

    logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise it warns of the token as of a problem
    try:
        if found := ANSWER_AT_ONCE.find():
            with_token(lambda: found[0](address=address))
    except AuthenticationError:
        raise UsageError(
            f"The Ray cluster at {address} asks for a token, and this machine's token is another one; copy "
            "~/.ray/auth_token from its head, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
        ) from None
    except RayError:
        raise _no_cluster(address, "what listens there is not a Ray cluster of this version") from None


def with_token(ask: Callable[[], T]) -> T:
    """What ``ask`` returns. If that needs a token, this machine's is shown from now on.

    Ray itself does so for a cluster that it finds, not for a plain ``HOST:PORT``. Raises AuthenticationError if there
    is no token, or another one.
    """
    from ray.exceptions import AuthenticationError

    try:
        return ask()
    except AuthenticationError:
        if "RAY_AUTH_MODE" in os.environ:
            raise
    set_variables({"RAY_AUTH_MODE": "token"})
    try:
        return ask()
    except AuthenticationError:
        del os.environ["RAY_AUTH_MODE"]
        set_variables({})
        raise


def _not_a_cluster(address: str) -> UsageError:
    """The error for a URL, which names something else than a cluster that this process can join."""
    if address.startswith("ray://"):
        return UsageError(
            f"The address is {address}, of a Ray client, in which nothing can be trained; use "
            "`raytrain submit --address http://HOST:8265 -- …`, or --address HOST:6379 on a machine of the cluster."
        )
    return UsageError(
        f"The address is {address}, which takes jobs: use `raytrain submit --address {address} -- …`, or choose a "
        "cluster with --address HOST:6379, auto or local."
    )


def _no_cluster(address: str, reason: str) -> UsageError:
    reason = reason.partition("\n")[0].rstrip(".")
    return UsageError(
        f"No Ray cluster answers at {address} ({reason}); check --address or RAY_ADDRESS, or use --address local for a "
        "new cluster on this machine."
    )
