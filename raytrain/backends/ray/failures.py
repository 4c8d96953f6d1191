"""Why workers and data tasks failed, in one line."""

from __future__ import annotations

import re

from raytrain.errors import RaytrainError

_OWN = re.compile(r"^raytrain\.errors\.\w+: ")


def root_cause(error: BaseException) -> str:
    """The one line that matters, out of the chain of exceptions that Ray wraps around it."""
    cause: BaseException | None = error
    while cause is not None:
        wrapped = getattr(cause, "cause", None)  # Ray's wrapper may be of the same class as what it wraps
        if isinstance(cause, RaytrainError) and wrapped is None:
            return str(cause)
        cause = wrapped or cause.__cause__
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(failures[min(failures)])
    text = str(error)
    if "UserCodeException" in text:  # Ray Data passes on what a task raised as text alone, followed by its own advice
        text = text.rpartition("The above exception was the direct cause")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return _OWN.sub("", lines[-1].strip()).rstrip(".") if lines else type(error).__name__
