"""Snapshot: the state of a run at one moment, for views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raytrain.monitor.events import TimedEvent
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SuspiciousLabel
from raytrain.runs.outcome import StopReason, TrainResult

Status = Literal["starting", "running", "finished", "stopped", "failed", "interrupted"]


class RowCursor(NamedTuple):
    """Position of a view in the history: the index of the next ``row`` that it needs, in the rows of ``attempt``."""

    attempt: int = 0
    row: int = 0


START = RowCursor()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of a run at one moment.

    ``rows`` are the metrics from index ``first_row`` on. If that is 0, a view must forget the rows that it has; then
    ``rows`` are all, or of a long history the newest and a part of the others. The view asks for the next snapshot with
    ``snapshot.cursor``, and so gets only the rows that it lacks.
    """

    name: str
    status: Status
    step: int
    num_steps: int
    steps_per_epoch: int  # 0 of a sweep, whose trials have epochs of their own
    num_workers: int
    elapsed_s: float  # since the user started the run, plus the time of earlier attempts
    startup_s: float | None = None  # part of it before the workers trained; None if they do not yet, or it is unknown
    time_left_s: float | None
    attempt: int
    first_row: int
    rows: Sequence[MetricRow]
    num_rows: int  # of the history so far
    latest: MetricRow | None  # of the kind "step"
    evaluation: MetricRow | None
    num_skipped: int
    num_retries: int
    stop_request: StopReason | None
    events: tuple[TimedEvent, ...]
    result: TrainResult | None
    machines: tuple[MachineUse, ...] = ()  # by the ranks of the workers
    in_debugger: bool = False  # the loop waits for a person, who types in the terminal
    dollars: float | None = None  # so far, in all attempts; None without --price
    gpu_kwh: float | None = None  # energy of the GPUs so far, in all attempts; None if unknown
    num_decoded_on_cpu: int = 0  # images that CPUs decoded in place of GPUs; each as often as it was used
    suspicious: tuple[SuspiciousLabel, ...] = ()  # training images whose labels look wrong, the worst first

    @property
    def cursor(self) -> RowCursor:
        """The cursor to ask for the next snapshot with, to get the rows after these."""
        return RowCursor(self.attempt, self.num_rows)

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1; 0 before the first step, and of a sweep."""
        return epoch_of(self.step, self.steps_per_epoch) if self.step and self.steps_per_epoch else 0

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run; the last one may be cut short. 0 of a sweep."""
        return epoch_of(self.num_steps, self.steps_per_epoch) if self.steps_per_epoch else 0

    @property
    def over(self) -> bool:
        """True if the run has ended, one way or another."""
        return self.status not in ("starting", "running")


View = Callable[[Snapshot], None]  # shows a run: called about twice a second with its state


def epoch_of(step: int, steps_per_epoch: int) -> int:
    """Return the epoch, counted from 1, that the ``step``-th step of a run (counted from 1) belongs to."""
    return max(1, math.ceil(step / steps_per_epoch))


def time_left_s(rows: Sequence[MetricRow], num_steps: int, step: int, now_s: float | None = None) -> float | None:
    """Extrapolate from the first and the last of ``rows`` how many seconds remain until ``num_steps``.

    ``step`` are the steps completed so far, which may be more than those of the last row. ``now_s`` is the present time
    on the clock of :attr:`Snapshot.elapsed_s`; by default that of the last row. Return None if the rows do not span a
    step.
    """
    if len(rows) < 2 or rows[-1].step <= rows[0].step:
        return None
    seconds_per_step = (rows[-1].elapsed_s - rows[0].elapsed_s) / (rows[-1].step - rows[0].step)
    # The time since the last row is spent already.
    since_s = 0.0 if now_s is None else now_s - rows[-1].elapsed_s
    left_s = (num_steps - rows[-1].step) * seconds_per_step - since_s
    # Steps that were faster than before need no time any more: after the last one, none is left.
    return max(0.0, min(left_s, (num_steps - step) * seconds_per_step))
