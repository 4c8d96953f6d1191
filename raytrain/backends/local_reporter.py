"""The reporter of a run whose own process keeps its monitor and documents, as in a sweep's trial."""

from __future__ import annotations

import threading

from raytrain.backends.run_watcher import LOOK_EVERY_S, RunWatcher
from raytrain.errors import OwnerChanged
from raytrain.monitor.events import Event
from raytrain.runs.machine_use import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import StopReason


class LocalReporter:
    """A :class:`raytrain.training.protocols.Reporter` that passes everything to a monitor of this process.

    While open, a thread looks at the run with ``watcher``, and passes stop requests on.
    """

    def __init__(self, monitor: RunMonitor, watcher: RunWatcher) -> None:
        self.monitor = monitor
        self.watcher = watcher
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watch")

    def __enter__(self) -> LocalReporter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._closed.set()
        self._thread.join()
        if kind is not None:
            self.watcher.abandon("interrupted" if kind is KeyboardInterrupt else "failed")

    def started(self, num_workers: int, step: int) -> None:
        """The training starts after ``step`` steps."""
        self.monitor.started(num_workers, step)

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics."""
        self.monitor.record(row)

    def measured(self, use: MachineUse) -> None:
        """Note how this worker's machine is used."""
        self.monitor.measured(use)

    def event(self, event: Event) -> None:
        """Note something worth a line."""
        self.monitor.event(event)

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
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                request = self.watcher.keep(self.watcher.look())
            except OwnerChanged as error:  # the training stops, and meets the same error with its last checkpoint
                request = StopReason("owner_changed", str(error))
            if request is not None:
                self.monitor.request_stop(request)
