"""Ray's exceptions: which ones say that an actor is gone, and each as a line that a user can read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

from raytrain.errors import RaytrainError

LOST_ACTOR = RayActorError, OutOfMemoryError
"""Raised by calls of an actor that has died: OutOfMemoryError if Ray's memory monitor killed it, else RayActorError."""
_DEAD_PROCESS = RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError
_CLASS_OF_OURS = re.compile(r"^raytrain\.errors\.\w+: ")


def root_cause(error: BaseException) -> str:
    """Return the one line that matters to a user, out of the exceptions that Ray wraps around the cause.

    Of several failed workers, it is that of :func:`first_failed`. Without a text, it is the name of the exception's
    class.

    Example: ``the bucket "photos" does not exist`` for a RayTaskError whose text is a traceback of three processes.
    """
    # Walk from the outermost exception to its cause. An error of our own is a sentence already, and if a process has
    # died, Ray's exception about that is the cause.
    cause: BaseException | None = error
    while cause is not None:
        # Ray's wrapper may have the same class as the exception in it. Ray Train's wrapper has it as an attribute.
        attributes = getattr(cause, "cause", None), getattr(cause, "health_check_failure", None)
        wrapped = next((value for value in attributes if isinstance(value, BaseException)), None)
        if isinstance(cause, RaytrainError) and wrapped is None:
            return str(cause)
        if isinstance(cause, _DEAD_PROCESS):
            # Ray's own text is a paragraph about all possible reasons.
            text = str(cause)
            if "node has died" in text or "node was terminated" in text:
                return "its machine is gone"
            if "low on memory" in text:
                return "Ray has ended its process because the machine's memory was nearly full"
            return "its process has died: it crashed, or something killed it, such as the system for lack of memory"
        cause = wrapped or cause.__cause__

    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(failures[first_failed(failures)])

    # Any other text is a traceback, whose last line says what happened.
    text = str(error)
    if "UserCodeException" in text:  # Ray Data passes on an exception of a task as text, followed by its own advice
        text = text.rpartition("The above exception was the direct cause")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return _CLASS_OF_OURS.sub("", lines[-1].strip()).rstrip(".") if lines else type(error).__name__


def first_failed(failures: Mapping[int, BaseException]) -> int:
    """Return the rank of the worker whose failure explains ``failures``, which are given by rank.

    If the process of a worker dies, the others fail, too, because they lose their connections to it: it is the lowest
    rank of those that died. If none died, it is the lowest rank of all, since mostly the others have the same cause.
    """
    died = [
        rank
        for rank, error in failures.items()
        if isinstance(getattr(error, "health_check_failure", error), _DEAD_PROCESS)
    ]
    return min(died or failures)
