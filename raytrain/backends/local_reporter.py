"""The reporter of a run whose own process keeps its monitor and documents: under torchrun, and in a sweep's trial."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raytrain.errors import OwnerChanged
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.recorder import RunRecorder
from raytrain.runs.stop_request import StopRequest

_LOOK_EVERY_S = 0.5


class LocalReporter:
    """A :class:`raytrain.training.protocols.Reporter` that passes everything to a monitor of this process.

    While open, a thread writes the run's heartbeat, looks for stop requests in its storage, and calls ``on_look``.
    """

    def __init__(self, monitor: RunMonitor, recorder: RunRecorder, on_look: Callable[[], None]) -> None:
        self.monitor = monitor
        self._recorder = recorder
        self._on_look = on_look
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="watch")

    def __enter__(self) -> LocalReporter:
        self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._watcher.join()

    def started(self, num_workers: int, step: int) -> None:
        """The training starts after ``step`` steps."""
        self.monitor.started(num_workers, step)

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics."""
        self.monitor.record(row)

    def event(self, text: str) -> None:
        """Note something worth a line."""
        self.monitor.event(text)

    def flush(self) -> None:
        """Wait until all rows so far are in storage."""
        self.monitor.flush()

    def stop_requested(self) -> bool:
        """Whether the run should stop."""
        return self.monitor.stop_request is not None

    def checkpoint_requested(self) -> bool:
        """Never: there are only the checkpoints that the options ask for."""
        return False

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            request = self._recorder.stop_request()
            if request is not None:
                self.monitor.request_stop(request)
            self._write_heartbeat()
            self._on_look()

    def _write_heartbeat(self) -> None:
        try:
            self._recorder.heartbeat(self.monitor.snapshot())
        except OwnerChanged as error:  # the training stops, and meets the same error with its last checkpoint
            self.monitor.request_stop(StopRequest(str(error)))
