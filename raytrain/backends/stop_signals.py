"""Ctrl-C and SIGTERM: the first one requests a stop, one that comes at least a second later aborts."""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any

from raytrain.runs.outcome import StopReason

_ONE_STOP_S = 1.0  # the shell, `uv run` and `ray job stop` each send or forward a signal for one Ctrl-C


class StopSignals:
    """While open, the first SIGINT or SIGTERM becomes :attr:`stop_request`.

    Signals within a second of the first belong to it. A later one raises KeyboardInterrupt. Opened in a thread other
    than the main one, where Python allows no signal handlers, it receives no signals; others may still call
    :meth:`request_stop`.
    """

    stop_request: StopReason | None = None
    _signalled_at_s: float | None = None

    def request_stop(self, request: StopReason) -> None:
        """Ask the run to stop with a checkpoint; the first request counts. From any thread, whatever storage does."""
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
        if self._signalled_at_s is None:
            self._signalled_at_s = monotonic()
        elif monotonic() - self._signalled_at_s >= _ONE_STOP_S:
            raise KeyboardInterrupt
        self.request_stop(StopReason("signal", signal.Signals(number).name))
