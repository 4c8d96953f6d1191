"""``raytrain submit``: sends a command to a cluster and follows it to its end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.launch.job_files import JobFiles, check_places, job_files
from raytrain.launch.ray.job_server import JobLog, JobServer, job_server_url
from raytrain.monitor.stop_request import StopSignals, request_stop
from raytrain.runs.documents import new_name
from raytrain.runs.outcome import StopReason

DETACHED = "DETACHED"
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Submission:
    """A command that was sent: its job and its run, and the files that went with it."""

    server: JobServer
    job: str
    name: str
    storage: str
    files: JobFiles


def submit(words: Sequence[str], config: TrainConfig, address: str | None) -> Submission:
    """Send the command ``words``, whose options are ``config``, to the job server at ``address``.

    Raises UsageError if the options name what only this machine has, or if no job server answers.
    """
    if config.address is not None:
        raise UsageError("--address is the job server's; give it before the --, and none after it.")
    check_places(config)
    files = job_files(config)
    server = JobServer(job_server_url(address))
    name = config.name or new_name(config.recipe)
    named = words if config.name else [*words, "--name", name]
    return Submission(server, server.submit(named, files, name), name, config.storage, files)


def follow_job(
    sent: Submission, show: Callable[[str], None], note: Callable[[str], None], detach: Callable[[], bool]
) -> str:
    """Show what the job prints until it ends; returns its status, or DETACHED.

    Ctrl-C and SIGTERM ask the run to stop with a checkpoint, unless ``detach`` answers that it should go on. ``note``
    gets lines about the job. Raises TrainingFailed if the job fails.
    """
    asked = False
    with StopSignals() as signals:
        log = JobLog(sent.server, sent.job, show, note)
        while not log.wait(_LOOK_EVERY_S):
            if signals.stop_request is None or asked:
                continue
            if detach():
                return DETACHED
            asked = True
            note("The run is asked to stop; it writes a checkpoint first.")
            _stop(sent, signals.stop_request)
    status = sent.server.status(sent.job)
    if status == "FAILED":
        raise TrainingFailed(_failure(sent), {"name": sent.name, "job": sent.job})
    return status


def _stop(sent: Submission, reason: StopReason) -> None:
    """Stop the run through its storage; through Ray if it is not there yet."""
    try:
        request_stop(sent.storage, sent.name, reason)
    except RaytrainError:
        sent.server.stop(sent.job)


def _failure(sent: Submission) -> str:
    message = sent.server.failure(sent.job)
    if missing := re.search(r"No module named '([\w.]+)'", message):
        return (
            f"Job {sent.job} failed: the cluster's Python lacks {missing[1]}; install there what "
            "cluster/requirements.txt has, and what your own code imports."
        )
    return f"Job {sent.job} failed; its log is above, and `ray job logs {sent.job}` shows it again."
