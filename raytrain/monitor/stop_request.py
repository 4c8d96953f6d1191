"""Requests to stop a run, from storage, from Ctrl-C and from the process that started it."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

from raytrain.errors import UsageError
from raytrain.runs.documents import STOP_REQUEST, open_run, read_json, write_json
from raytrain.runs.outcome import StopReason
from raytrain.runs.status import read_status
from raytrain.storage.store import Store

_ONE_STOP_S = 1.0  # the shell, `uv run` and `ray job stop` each send or forward a signal for one Ctrl-C


def request_stop(storage: str, name: str, reason: StopReason) -> None:
    """Leave a stop request in the storage of a run. Raise UsageError if there is no such run, or it does not train."""
    # Only a run that trains reads the request.
    store = open_run(storage, name)
    status = read_status(store)
    if not status.active:
        resume = "" if status.status == "finished" else "; resume it with --resume"
        raise UsageError(f"Run {name!r} is not training: it is {status.status} at step {status.step:,}{resume}.")
    write_json(store, STOP_REQUEST, reason.to_json())


def read_stop_request(store: Store) -> StopReason | None:
    """Return the stop request that lies in a run's storage, if there is one."""
    with suppress(ValueError):
        return StopReason.from_json(read_json(store, STOP_REQUEST))
    return None


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
        # Handlers that were there before are put back at the end.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a signal that comes well after the first one is a second Ctrl-C.
        if self._signalled_at_s is None:
            self._signalled_at_s = monotonic()
        elif monotonic() - self._signalled_at_s >= _ONE_STOP_S:
            raise KeyboardInterrupt
        self.request_stop(StopReason("signal", signal.Signals(number).name))
