"""Ctrl-C and SIGTERM: the first one requests a stop, the second one aborts."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from raytrain.runs.stop_request import StopRequest


class StopSignals:
    """While open, the first SIGINT or SIGTERM becomes :attr:`stop_request`; the second raises KeyboardInterrupt.

    Opened in a thread other than the main one, where Python allows no signal handlers, it hears no signals; others may
    still call :meth:`request_stop`.
    """

    stop_request: StopRequest | None = None

    def request_stop(self, request: StopRequest) -> None:
        """Ask the run to stop with a checkpoint; the first request counts."""
        self.stop_request = self.stop_request or request

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_request is not None:
            raise KeyboardInterrupt
        self.request_stop(StopRequest("Ctrl-C" if number == signal.SIGINT else "SIGTERM"))
