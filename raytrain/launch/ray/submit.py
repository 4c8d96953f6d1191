"""`raytrain submit`: sends a command to the job server of a cluster and follows it to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import raytrain
from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.launch.gather_provenance import COMMIT_VARIABLE, GitStatus, own_code_files
from raytrain.launch.job_files import JobFiles
from raytrain.launch.ray.find_cluster import with_token
from raytrain.launch.ray.private_api import JOB_SERVER_VERSION, OLDEST, minor_version
from raytrain.monitor.stop_request import StopSignals, request_stop
from raytrain.runs.documents import new_name
from raytrain.runs.outcome import SUBMIT_VARIABLE
from raytrain.storage.clouds.cloud import is_loopback
from raytrain.storage.temporary_files import TemporaryFolder

DETACHED = "DETACHED"
_POLL_EVERY_S = 0.5
_TALKATIVE = ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging")
"""Loggers of Ray that print a line for each package and each connection of its client."""


@dataclass(frozen=True)
class Submission:
    """A command that was sent to a job server: its job, and the name and storage of its run."""

    server: JobServer
    job: str
    name: str
    storage: str


def submit(words: Sequence[str], config: TrainConfig, files: JobFiles, address: str | None) -> Submission:
    """Send the command ``words``, whose options are ``config``, with ``files`` to the job server at ``address``.

    A run without a name gets one here, by which the user can stop it. Raises UsageError if there is no job server, or
    if it does not take the job.
    """
    server = JobServer(job_server_url(address))
    name = config.name or new_name(config.recipe)
    command = words if config.name else [*words, "--name", name]
    commit = GitStatus(list(own_code_files(config))).to_variable()
    return Submission(server, server.submit(command, files, name, commit), name, config.storage)


def entrypoint(words: Sequence[str]) -> str:
    """Return the command of a job that runs ``raytrain WORDS``."""
    return shlex.join(["python", "-m", "raytrain", *words])


def follow_job(
    submission: Submission, show: Callable[[str], None], note: Callable[[str], None], detach: Callable[[], bool]
) -> str:
    """Show the job's output until it ends; return its status, STOPPED or SUCCEEDED, or DETACHED.

    Ctrl-C and SIGTERM ask the run to stop with a checkpoint, unless ``detach`` returns True. If it does, or the
    terminal is closed, the job goes on, and this function returns. ``show`` gets the output, ``note`` lines about the
    job. Raises TrainingFailed if the job fails, and what :meth:`JobLog.wait` raises.
    """
    client, job = submission.server.client, submission.job
    is_decided = is_stopping = False  # whether the user wants to stop the run, and whether it has got the request
    with StopSignals() as signals:
        log = JobLog(submission.server, job, show, note)
        while not log.wait(_POLL_EVERY_S):
            if signals.stop_request is None or is_stopping:
                continue
            if not is_decided:
                if signals.stop_request.detail == "SIGHUP" or detach():
                    return DETACHED
                is_decided = True
                note("The run is asked to stop; it writes a checkpoint first.")
            # Leave the request in the run's storage. If the run is not there yet, or this machine cannot reach it, have
            # Ray send the job a SIGTERM. If the connection is lost, too, ask again at the next turn.
            try:
                request_stop(submission.storage, submission.name, signals.stop_request)
                is_stopping = True
            except RaytrainError:
                with suppress(RuntimeError, OSError):
                    client.stop_job(job)
                    is_stopping = True
    if log.status != "FAILED":
        return log.status

    # If only a package is missing, the end of the job's log says so.
    message = ""
    with suppress(RuntimeError, OSError):
        message = client.get_job_info(job).message or ""
    reason = f"Job {job} failed; its log is above, and `ray job logs {job}` shows it again."
    if missing := re.search(r"No module named '([\w.]+)'", message):
        reason = (
            f"Job {job} failed: the cluster's Python lacks {missing[1]}; install there what "
            "cluster/requirements.txt has, and what your own code imports."
        )
    raise TrainingFailed(reason, {"name": submission.name, "job": job})


def ask_doctor(server: JobServer, config: TrainConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Have `raytrain doctor` check the cluster in a small job; return its report on all nodes.

    The job uses the credentials and endpoints of the machines there, as a run would. ``note`` gets lines about lost
    connections. Raises UsageError with the doctor's error if it fails. If this function is interrupted, the job is
    stopped.

    Example: ``ask_doctor(JobServer("http://head:8265"), config, print)["nodes"]``
    """
    words = ["doctor", "--storage", config.storage, "--json", *(["--data", config.data] if config.data else [])]
    job = server.submit(words, JobFiles(Path.cwd(), ()), "doctor")
    printed: list[str] = []
    log = JobLog(server, job, printed.append, note)
    try:
        while not log.wait(_POLL_EVERY_S):
            pass
    except BaseException:
        with suppress(RuntimeError, OSError):  # the cluster does not answer
            server.client.stop_job(job)
        raise

    # The report, or an error, is a line of JSON among the lines of the log.
    documents: list[dict[str, Any]] = []
    for line in "".join(printed).splitlines():
        with suppress(ValueError):
            document: Any = json.loads(line)
            documents += [document] if isinstance(document, dict) else []
    report = documents[-1] if documents else {}
    if "nodes" in report:
        return report
    reason = report.get("error", f"`ray job logs {job}` shows what its job said")
    raise UsageError(f"The cluster could not be checked: {str(reason).rstrip('.')}.")


STOP_WAIT_S = 300  # how long Ray waits for a checkpoint when the job is stopped, before it kills the job
RETRY_S = 2.0
STARTS_WITHIN_S = 60.0
GIVE_UP_AFTER_S = 600.0
GCS_PORT = 6379


class JobServer:
    """A cluster's job server at ``http://HOST:PORT``. Raises UsageError if none answers, or its Ray is too old."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = job_client(address)
        self.ray_version = ""
        """The cluster's version of Ray; empty if the Ray of this process has no function that asks for it."""
        if api := JOB_SERVER_VERSION.find():  # a method of Ray's client, which is undocumented and may be missing
            (request_of_client,) = api
            answer = request_of_client(self.client, "GET", "/api/version")
            self.ray_version = answer.json()["ray_version"]
            if minor_version(self.ray_version) < OLDEST:
                raise UsageError(
                    f"The cluster at {address} has Ray {self.ray_version}, and raytrain needs {OLDEST[0]}.{OLDEST[1]} "
                    "or newer; install a newer one there, such as that of cluster/requirements.txt."
                )

    def submit(self, words: Sequence[str], files: JobFiles, name: str, commit: str | None = None) -> str:
        """Start ``raytrain WORDS`` with this machine's raytrain and ``files``; return the job's ID.

        ``name`` is that of the run, for the list of jobs. ``commit`` is the result of :meth:`GitStatus.to_variable` for
        the folder of the files. Raises UsageError if the server does not take the job, or still starts after a minute.
        """
        job = f"raytrain_{uuid.uuid4().hex[:12]}"
        with TemporaryFolder() as folder:
            files.copy_to(folder / "files")
            (folder / "files").mkdir(exist_ok=True)  # without any files, there is no folder yet
            # What the job says to type is typed here. Its variables are public, so an address with a password is none.
            include = ["--include", *files.include] if files.include else []
            again = ["submit", *include, "--address", self.address, "--"]
            environment = {
                "working_dir": str(folder / "files"),
                "py_modules": [str(Path(raytrain.__file__).parent)],
                "env_vars": {
                    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
                    **({COMMIT_VARIABLE: commit} if commit else {}),
                    **({SUBMIT_VARIABLE: shlex.join(again)} if "@" not in self.address else {}),
                },
            }

            # While a head starts, its job server listens already, and answers with status 500.
            give_up_at = time.monotonic() + STARTS_WITHIN_S
            while True:
                try:
                    self.client.submit_job(
                        submission_id=job,
                        entrypoint=entrypoint(words),
                        metadata={"raytrain_run": name},
                        runtime_env=environment,
                    )
                    return job
                except (RuntimeError, OSError) as error:
                    if f"{job} already exists" in str(error):  # the job was accepted, and only the answer was lost
                        return job
                    if "status code 500" not in str(error) or time.monotonic() > give_up_at:
                        reason = str(error).rstrip(".\n ").rpartition("\n")[2]  # a traceback's last line says why
                        raise UsageError(f"The job server at {self.address} did not take the job ({reason}).") from None
                time.sleep(RETRY_S)

    def status(self, job: str) -> str:
        """Return PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.

        Raises RuntimeError if the server does not know the job, and OSError if it does not answer.
        """
        return str(self.client.get_job_status(job).value)


def job_server_url(address: str | None) -> str:
    """Return the URL of the job server that ``address``, or else a variable of Ray in the environment, names.

    Raises UsageError if that is not the address of a job server. Example: ``job_server_url("head:8265")`` is
    ``"http://head:8265"``.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ""
    url = address if "://" in address else f"http://{address}"
    try:
        scheme, port = urlsplit(url).scheme, urlsplit(url).port
    except ValueError:  # the port is no number, or too large
        scheme, port = "", None
    if ":" not in address or scheme not in ("http", "https") or port == GCS_PORT:
        problem = f"--address is {address}" if address else "--address is missing"
        raise UsageError(f"{problem}; give the cluster's job server, http://HOST:8265 as `ray start` and `ray up` say.")
    return url.rstrip("/")


def job_client(address: str) -> Any:
    """Return Ray's client of the job server at ``address``.

    Ray's own messages about it are silenced, and this process reaches a server on its own machine without a proxy from
    now on. Raises UsageError if no server answers, or if it refuses this machine's token.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)  # after the import, which sets it
    host = urlsplit(address).hostname or ""
    if is_loopback(address):  # such as a forwarded port, which Ray's client would look for behind HTTP_PROXY
        excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        os.environ["no_proxy"] = f"{excluded},{host}".lstrip(",")
    try:
        return with_token(lambda: JobSubmissionClient(address))
    except AuthenticationError:
        raise UsageError(
            f"The cluster at {address} asks for a token, and this machine's is another one, or none; copy "
            "~/.ray/auth_token from its head, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
        ) from None
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")

    # No job server answers. If the cluster does, at the port for its own machines, say that instead.
    try:
        socket.create_connection((host, GCS_PORT), timeout=2.0).close()
    except OSError:
        raise UsageError(
            f"No job server answers at {address} ({reason}); is the cluster up, and its port forwarded?"
        ) from None
    raise UsageError(
        f"The cluster at {host}:{GCS_PORT} answers, but its job server at {address} does not; forward its port with "
        "`ray dashboard` or ssh -L 8265:localhost:8265."
    )


class JobLog:
    """Passes a job's output to ``show``, in a thread, until the job ends, over as many connections as that takes.

    ``note`` gets a line whenever the connection is lost or found again. If ``show`` can write no more, the thread ends.
    """

    def __init__(self, server: JobServer, job: str, show: Callable[[str], None], note: Callable[[str], None]) -> None:
        self.status = "PENDING"
        """The job's status, as :meth:`JobServer.status` returns it, when the server was last asked."""
        self._server, self._job, self._show, self._note = server, job, show, note
        self._num_shown = 0  # characters
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._follow, name="job log", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the end of the job; return whether it has ended.

        Raises RaytrainError if the cluster was silent for ten minutes or has lost the job, and what ``show`` and
        ``note`` have raised.
        """
        ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return ended

    def _follow(self) -> None:
        """Show the log until the job ends; keep an exception for :meth:`wait`, which raises it."""
        try:
            self._show_until_end()
        except _OutputFailed as failed:
            self._error = failed.__cause__
            with suppress(OSError):
                self._note("The output cannot be written here any more. The job goes on.")
        except Exception as error:
            self._error = error
        self._ended.set()

    def _show_until_end(self) -> None:
        """Show the log until the job ends, over as many connections as that takes."""
        from aiohttp import ClientError

        address = self._server.address
        lost_at: float | None = None  # since when there is no connection; None while there is one
        while True:
            try:
                asyncio.run(self._show_rest())
                # The log has ended with the job, or because the connection was lost; Ray's client does not say which.
                self.status = self._server.status(self._job)
            except (ClientError, RuntimeError, OSError):
                if self._is_unknown():
                    raise RaytrainError(
                        f"The cluster at {address} no longer knows job {self._job}: its head was started again, which "
                        "ends all jobs; `raytrain show` says how far the run is, and --resume continues it."
                    ) from None
                # A laptop may sleep, and a tunnel may break, while the job trains on.
                if lost_at is None:
                    self._note(f"The connection to {address} is lost. The job goes on; trying again.")
                    lost_at = time.monotonic()
                elif time.monotonic() - lost_at > GIVE_UP_AFTER_S:
                    raise RaytrainError(
                        f"The cluster at {address} has not answered for {GIVE_UP_AFTER_S / 60:.0f} minutes; "
                        "`raytrain show` says how far the run is."
                    ) from None
            else:
                if lost_at is not None:
                    self._note("Connected again.")
                    lost_at = None
                if self.status not in ("PENDING", "RUNNING"):
                    return
            time.sleep(RETRY_S)

    def _is_unknown(self) -> bool:
        """Return whether the job server answers that it has no such job."""
        try:
            self._server.status(self._job)
        except (RuntimeError, OSError) as error:
            return f"Job {self._job} does not exist" in str(error)
        return False

    async def _show_rest(self) -> None:
        """Show the job's output until it ends or the connection is lost, without the part that was shown before.

        Raises _OutputFailed if ``show`` cannot write.
        """
        # Each connection gets the log from its beginning, so skip what was shown.
        num_to_skip, num_seen = self._num_shown, 0
        async for text in self._server.client.tail_job_logs(self._job):
            if new := text[max(0, num_to_skip - num_seen) :]:
                self._num_shown += len(new)
                try:
                    self._show(new)
                except OSError as error:
                    raise _OutputFailed from error
            num_seen += len(text)


class _OutputFailed(Exception):
    """The job's output cannot be written here, as its cause says; the connection to the cluster is not lost."""
