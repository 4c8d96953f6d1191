"""Ray's exceptions: which ones say that an actor is gone, and each as a line that a user can read."""

from __future__ import annotations

import re

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

from raytrain.errors import RaytrainError

LOST_ACTOR = RayActorError, OutOfMemoryError
"""Raised by calls of an actor that has died. Of one that Ray's memory monitor has killed, it is not a RayActorError."""
_CLASS_OF_OURS = re.compile(r"^raytrain\.errors\.\w+: ")


def root_cause(error: BaseException) -> str:
    """Return the one line that matters, out of the chain of exceptions that Ray wraps around it.

    Example: of a RayTaskError whose text is a traceback of three processes, ``the bucket "photos" does not exist``.
    """
    # Our own errors are sentences already, and of a death Ray knows more than the exceptions around it.
    cause: BaseException | None = error
    while cause is not None:
        # Ray's wrapper may be of the same class as what it wraps; Ray Train's names what it noticed.
        wrapped = getattr(cause, "cause", None) or getattr(cause, "health_check_failure", None)
        if isinstance(cause, RaytrainError) and wrapped is None:
            return str(cause)
        if isinstance(cause, (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)):
            # Ray's own text is a paragraph about all that it may have been.
            text = str(cause)
            if "node has died" in text or "node was terminated" in text:
                return "its machine is gone"
            if "low on memory" in text:
                return "Ray has ended its process because the machine's memory was nearly full"
            return "its process has died: it crashed, or something killed it, such as the system for lack of memory"
        cause = wrapped or cause.__cause__

    # If several workers have failed, the others mostly failed because the first one did.
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(failures[min(failures)])

    # Anything else is a traceback, whose last line says what happened.
    text = str(error)
    if "UserCodeException" in text:  # Ray Data passes on what a task raised as text alone, followed by its own advice
        text = text.rpartition("The above exception was the direct cause")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return _CLASS_OF_OURS.sub("", lines[-1].strip()).rstrip(".") if lines else type(error).__name__
