"""Calls to storage in the background, and limits on how often something is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar


class Throttle:
    """Remembers when each thing was done last."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def due(self, what: str, every_s: float) -> bool:
        """Whether to do ``what`` now: the first time, and whenever ``every_s`` seconds have passed since the last."""
        now = time.monotonic()
        if now - self._last.get(what, -every_s) < every_s:
            return False
        self._last[what] = now
        return True


Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Background(Generic[Argument, Result]):
    """Calls ``function`` in a thread, one call at a time."""

    def __init__(self, function: Callable[[Argument], Result]) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._running: Future[Result] | None = None

    def __call__(self, argument: Argument) -> Result | None:
        """Start a call unless one runs; returns or raises what the one before did, None if it still runs."""
        before = self._running
        if before is not None and not before.done():
            return None
        self._running = self._executor.submit(self._function, argument)
        return before.result() if before is not None else None

    def close(self, within_s: float | None = None) -> bool:
        """Wait until the last call has ended, however long that takes by default; returns whether it has."""
        self._executor.shutdown(wait=within_s is None)
        return self._running is None or not wait([self._running], within_s).not_done
