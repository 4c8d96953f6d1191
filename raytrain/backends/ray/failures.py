"""Failures of workers and of data tasks, said in one line."""

from __future__ import annotations

import re
from typing import Any

from ray.train import UserCallback

from raytrain.errors import RaytrainError

_OWN = re.compile(r"^raytrain\.errors\.\w+: ")


class FailureReporter(UserCallback):
    """Tells the run's actor why a worker group failed; Ray Train then starts another one (up to ``--max-failures`` times)."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """See :class:`ray.train.UserCallback`."""
        rank, error = min(worker_exceptions.items())
        self._coordinator.event.remote(f"worker {rank} failed: {root_cause(error)}")


def root_cause(error: BaseException) -> str:
    """The one line that says something, out of the chain of exceptions that Ray wraps round it."""
    cause: BaseException | None = error
    while cause is not None:
        wrapped = getattr(cause, "cause", None)  # by Ray, in an error that is of the same class, too
        if isinstance(cause, RaytrainError) and wrapped is None:
            return str(cause)
        cause = wrapped or cause.__cause__
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(failures[min(failures)])
    text = str(error)
    if "UserCodeException" in text:  # Ray Data hands on what a task raised as text alone, and advice of its own behind it
        text = text.rpartition("The above exception was the direct cause")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return _OWN.sub("", lines[-1].strip()).rstrip(".") if lines else type(error).__name__
