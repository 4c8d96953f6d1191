"""Calls in the background, one at a time, and a throttle, which limits how often something is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar


class Throttle:
    """Limits how often actions are carried out.

    Example:
        >>> throttle = Throttle()
        >>> throttle.due("heartbeat", every_s=10.0), throttle.due("heartbeat", every_s=10.0)
        (True, False)
    """

    def __init__(self) -> None:
        self._last_time: dict[str, float] = {}

    def due(self, action: str, every_s: float) -> bool:
        """Return True if ``action`` is due: the first time, and ``every_s`` seconds after this last returned True."""
        time_s = time.monotonic()
        if time_s - self._last_time.get(action, -every_s) < every_s:
            return False
        self._last_time[action] = time_s
        return True


Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Background(Generic[Argument, Result]):
    """Calls ``function`` in a thread, one call at a time, so that a call which hangs holds up nobody.

    Example:
        >>> recording = Background(write_documents)
        >>> recording(snapshot)  # starts the first call, and returns None
        >>> recording(snapshot)  # returns the result of the first call if it has ended, and starts the second
    """

    def __init__(self, function: Callable[[Argument], Result]) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._running: Future[Result] | None = None

    def __call__(self, argument: Argument) -> Result | None:
        """Start a call unless one is running; return the result of the previous call, or raise its exception.

        Returns None, and starts nothing, while a call runs. Returns None the first time.
        """
        previous = self._running
        if previous is not None and not previous.done():
            return None
        self._running = self._executor.submit(self._function, argument)
        return previous.result() if previous is not None else None

    def close(self, within_s: float | None = None) -> bool:
        """Wait until the last call has ended, by default without a limit; return True if it has.

        No call can be started any more. The result of the last call, or its exception, is dropped.
        """
        self._executor.shutdown(wait=within_s is None)
        return self._running is None or not wait([self._running], within_s).not_done
