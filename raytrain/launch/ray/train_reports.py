"""Reports a run's metrics to Ray Train or Ray Tune, by `ray.train.report` in a worker or `ray.tune.report` in a trial.

In Ray Train, all workers make the n-th report together: each waits in it for the others, and then for the controller,
which asks about every two seconds. So every worker reports in a thread beside its loop, and worker 0 decides what is
reported, the newest evaluation if there are several, and sends it to the others.

A report without a checkpoint only reaches callbacks, such as Tune's. The result of `trainer.fit()` has the metrics of
the last report with a checkpoint, so the last report of an attached run has one.
"""

from __future__ import annotations

import dis
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import ray.train
import ray.tune

from raytrain.launch.attached_launch import GroupMessages
from raytrain.launch.ray.private_api import is_tune_trial
from raytrain.runs.metric_row import MetricRow
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.trackers.tracker import row_metrics
from raytrain.training.loop_checks.reached_code import own_code
from raytrain.training.protocols import Worker

_log = logging.getLogger("raytrain")
CHECKPOINT_FILE = "checkpoint.pt"
"""The name of raytrain's own checkpoint in a checkpoint of Ray, which is a folder."""
_POLL_EVERY_S = 0.2
# Functions of Ray that all workers call together, and wait in for each other.
_MEETINGS = {"report", "collective", "barrier", "broadcast_from_rank_zero", "get_all_reported_checkpoints"}
_END = "end"  # sent to the other workers in place of metrics, after the last report
Report = Callable[[dict[str, Any], Path | None], None]
"""Takes metrics, and the folder of a checkpoint, if there is one."""


def report_to_ray() -> Report | None:
    """Return the function that reports to Ray; None if this process is neither a worker of Ray Train nor a trial."""
    if is_tune_trial():
        return lambda metrics, folder: ray.tune.report(
            metrics, checkpoint=folder and ray.tune.Checkpoint.from_directory(folder)
        )
    try:
        ray.train.get_context()
    except (RuntimeError, DeprecationWarning):  # this is no worker of Ray Train
        return None
    return lambda metrics, folder: ray.train.report(
        metrics, checkpoint=folder and ray.train.Checkpoint.from_directory(folder)
    )


def meets_in_ray(loop: object) -> bool:
    """Return whether the code of ``loop`` calls Ray's ``report``, or another function that all workers call together.

    Beside such a call, no thread may report: Ray Train would take its report for the call that the other workers make.
    A function is known by its name; only torch's ``barrier`` is distinguished from Ray's.
    """
    return any(_meets(code, names) for code, names in own_code(loop))


def _meets(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Return whether the bytecode ``code``, with these global ``names``, loads one of the functions in _MEETINGS."""
    value = None  # what the code has loaded last: a global variable, a module, or something in a module; else None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = names.get(name)
        elif instruction.opname == "IMPORT_NAME":
            value = sys.modules.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            value = getattr(value, name, None) if isinstance(value, ModuleType) else None
        else:  # another load replaces the object; instructions between two parts of a.b leave it
            value = None if instruction.opname.startswith("LOAD_") else value
            continue
        is_of_torch = getattr(value, "__module__", "").startswith("torch.")
        if name in _MEETINGS and not (name == "barrier" and is_of_torch):
            return True
    return False


class RayReports:
    """Reports the evaluations of a run to Ray, in a thread of each worker.

    Worker 0 gets the rows of the history by :meth:`add`, and sends their metrics to the others by ``messages``, which a
    single worker does not need. ``report`` passes them on to Ray; if it fails once, nothing more is reported, and the
    run goes on. The evaluation after the last of ``num_steps`` is left to :meth:`finish`. ``on_stop`` is called, in a
    thread, when Ray Tune ends the trial.

    Example:
        >>> reports = RayReports(report, worker, messages, num_steps, on_stop)
        >>> reports.add(row)
        >>> reports.finish({"status": "finished"}, checkpoint)
    """

    def __init__(
        self,
        report: Report,
        worker: Worker,
        messages: GroupMessages | None,
        num_steps: int | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._report, self._worker, self._messages = report, worker, messages
        self._num_steps, self._on_stop = num_steps, on_stop
        self._metrics: dict[str, Any] = {}  # the newest value of each
        self._due: dict[str, Any] | None = None  # the metrics to report next
        self._changed = threading.Condition()
        self._is_closed = self._has_failed = False
        target = self._report_evaluations if worker.rank == 0 else self._report_what_comes
        self._thread = threading.Thread(target=target, daemon=True, name="ray-reports")
        self._thread.start()

    def add(self, row: MetricRow) -> None:
        """Take a row of the history, on worker 0; an evaluation is reported soon, in a thread."""
        with self._changed:
            self._metrics |= {"step": row.step, "epoch": row.epoch, **row_metrics(row)}
            if row.kind == "evaluation" and row.step != self._num_steps:
                self._due = dict(self._metrics)
                self._changed.notify()

    def finish(self, metrics: dict[str, Any], checkpoint: bytes | None) -> None:
        """Report the end of the run, on all workers; return when Ray has taken all reports.

        ``metrics`` are reported with the newest value of all others. ``checkpoint`` is the content of the run's last
        checkpoint, on worker 0, and None on the others.
        """
        self._close()
        self._thread.join()
        if self._has_failed:
            return
        with TemporaryFolder() as temporary:
            folder = None
            if checkpoint is not None:
                folder = temporary / "checkpoint"  # Ray takes everything in it
                folder.mkdir()
                (folder / CHECKPOINT_FILE).write_bytes(checkpoint)
            self._report_unless_failed(self._metrics | metrics, folder)

    def abort(self) -> None:
        """Report nothing more, because the run has failed; do not wait for a report that has begun."""
        with self._changed:
            self._due = None
        self._close()

    def _close(self) -> None:
        """Have the thread of worker 0 end, after what is due; it tells the threads of the other workers to end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _report_evaluations(self) -> None:
        """Send the metrics of evaluations to the other workers, and report them, on worker 0, until this is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None or self._is_closed)
                metrics, self._due = self._due, None
            for rank in range(1, self._worker.world_size):
                assert self._messages is not None
                self._messages.send(f"reports to worker {rank}", _END if metrics is None else metrics)
            if metrics is None:
                return
            self._report_unless_failed(metrics, None)

    def _report_what_comes(self) -> None:
        """Report the same evaluations as worker 0, on another worker, until worker 0 sends the end."""
        assert self._messages is not None
        pause = threading.Event()
        while (message := self._messages.take(f"reports to worker {self._worker.rank}")) != _END:
            if message is None:
                pause.wait(_POLL_EVERY_S)
            else:
                self._report_unless_failed(message, None)

    def _report_unless_failed(self, metrics: dict[str, Any], folder: Path | None) -> None:
        """Report to Ray. If that fails, warn, and report nothing from then on: the run goes on."""
        try:
            if not self._has_failed:
                self._report(metrics, folder)
        except SystemExit:  # Tune ends a trial by it
            self._has_failed = True
            self._on_stop()
        except Exception as error:
            self._has_failed = True
            _log.warning("Ray does not take the metrics of the run, which goes on without: %s", error)
