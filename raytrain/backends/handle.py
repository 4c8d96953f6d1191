"""A run in a thread of this process, such as a notebook's, that is watched, stopped and waited for through a handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, Any

from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import train
from raytrain.config import TrainConfig
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.snapshot import Snapshot, View
from raytrain.runs.trackers.protocol import Tracker

if TYPE_CHECKING:
    from raytrain.training.run import Run


class RunHandle:
    """A run that trains in a thread of this process; :func:`raytrain.start` makes one.

    ``await handle`` is :meth:`result` for asynchronous code. In a notebook it leaves the kernel free for a Stop button.
    """

    def __init__(
        self,
        config: TrainConfig,
        loop: Callable[[Run], None] | None,
        view: View | None,
        trackers: Sequence[str | Tracker] = (),
    ) -> None:
        self._view = view
        self._trackers = trackers
        self._signals = StopSignals()
        self._snapshot: Snapshot | None = None
        self._result: Future[TrainResult] = Future()
        self._thread = Thread(target=self._train, args=(config, loop), name="raytrain", daemon=True)
        self._thread.start()

    @property
    def snapshot(self) -> Snapshot | None:
        """How the run stands, half a second old at most; None while it is starting."""
        return self._snapshot

    @property
    def done(self) -> bool:
        """Whether the run has ended, one way or another."""
        return self._result.done()

    def stop(self, reason: str = "stop() of its handle") -> None:
        """Ask the run to stop with a checkpoint; returns at once."""
        self._signals.request_stop(StopReason("caller", reason))

    def result(self, timeout_s: float | None = None) -> TrainResult:
        """Wait for the run's end. Raises what :func:`raytrain.train` raises, and TimeoutError after ``timeout_s``."""
        return self._result.result(timeout_s)

    def __await__(self) -> Generator[Any, None, TrainResult]:
        return asyncio.shield(asyncio.wrap_future(self._result)).__await__()

    def on_end(self, call: Callable[[BaseException | None], None]) -> None:
        """Call ``call`` when the run has ended, with what :meth:`result` raises; at once if it has ended already."""
        self._result.add_done_callback(lambda result: call(result.exception()))

    def _train(self, config: TrainConfig, loop: Callable[[Run], None] | None) -> None:
        try:
            result = train(config, loop=loop, view=self._update, signals=self._signals, trackers=self._trackers)
            self._result.set_result(result)
        except BaseException as error:
            self._result.set_exception(error)

    def _update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if self._view is not None:
            self._view(snapshot)
