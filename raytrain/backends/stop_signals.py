"""Ctrl-C and SIGTERM: the first asks for a stop, the second aborts."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """While open, the first SIGINT or SIGTERM only sets :attr:`reason`; the second raises KeyboardInterrupt in the main thread.

    Opened in another thread than the main one (where Python allows no handlers) it does nothing.
    """

    reason: str | None = None

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
