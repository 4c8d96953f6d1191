"""Calls that may hang, made in a thread beside a loop that must not wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Background(Generic[Argument, Result]):
    """Calls ``function`` in a thread, one call at a time."""

    def __init__(self, function: Callable[[Argument], Result]) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._running: Future[Result] | None = None

    def __call__(self, argument: Argument) -> Result | None:
        """Start a call, unless the one before still runs; return what that one returned, or raise what it raised.

        None if there was none, or if it still runs.
        """
        before = self._running
        if before is not None and not before.done():
            return None
        self._running = self._executor.submit(self._function, argument)
        return before.result() if before is not None else None

    def close(self, within_s: float | None = None) -> bool:
        """Wait until the last call has ended, however long that takes by default; returns whether it has."""
        self._executor.shutdown(wait=within_s is None)
        return self._running is None or not wait([self._running], within_s).not_done
