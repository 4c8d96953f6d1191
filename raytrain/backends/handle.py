"""A run beside whoever started it, such as a notebook that goes on: watched, stopped and waited for through a handle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING

from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import TrainResult, View, train
from raytrain.config import TrainConfig

if TYPE_CHECKING:
    from raytrain.runs.monitor import Snapshot
    from raytrain.training.run import Run


class RunHandle:
    """A run that trains in a thread of this process; :func:`start` gives one."""

    def __init__(self, config: TrainConfig, loop: Callable[[Run], None] | None, view: View | None) -> None:
        self._view = view
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
        self._signals.reason = self._signals.reason or reason

    def result(self, timeout_s: float | None = None) -> TrainResult:
        """Wait for the run's end; raises what :func:`raytrain.train` raises, and TimeoutError after ``timeout_s`` seconds."""
        return self._result.result(timeout_s)

    def _train(self, config: TrainConfig, loop: Callable[[Run], None] | None) -> None:
        try:
            self._result.set_result(train(config, loop=loop, view=self._look, signals=self._signals))
        except BaseException as error:
            self._result.set_exception(error)

    def _look(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if self._view is not None:
            self._view(snapshot)


def start(config: TrainConfig, *, loop: Callable[[Run], None] | None = None, view: View | None = None) -> RunHandle:
    """As :func:`raytrain.train`, but return at once, with a handle of the run.

    Args:
        config: the options.
        loop: a training loop of your own.
        view: called about twice a second with the run's :class:`Snapshot`; by default, in a notebook, its picture below the cell.
    """
    return RunHandle(config, loop, view or _notebook_view())


def _notebook_view() -> View | None:
    """A view where this process is a notebook's."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    if getattr(get_ipython(), "kernel", None) is None:
        return None
    from raytrain.display.notebook import NotebookView

    return NotebookView().update
