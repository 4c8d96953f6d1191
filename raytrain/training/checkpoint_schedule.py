"""When a checkpoint is due, after so many steps, epochs or seconds, and which one was written last."""

from __future__ import annotations

import time
from collections.abc import Callable

from raytrain.config import TrainConfig
from raytrain.runs.checkpoint_files import checkpoint_path
from raytrain.runs.outcome import DIVERGED_HINT


class CheckpointSchedule:
    """Knows when the last checkpoint was written, and whether the next one is due.

    ``saved_step`` is the step of the newest checkpoint; None if the run has no checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        steps_per_epoch: int,
        saved_step: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.saved_step = saved_step
        self._diverged_step: int | None = None  # of a checkpoint that was due later and not written
        every = config.checkpoint_intervals
        self._every_steps = (every.steps, every.epochs * steps_per_epoch)
        self._every_s = every.seconds
        self._clock = clock
        self._saved_at = clock()

    def due_at(self, step: int) -> bool:
        """Whether the options ask for a checkpoint after ``step`` completed steps."""
        return any(every > 0 and step % every == 0 for every in self._every_steps)

    def due_by_time(self) -> bool:
        """Whether the last checkpoint, or the start of the run, is too many seconds ago."""
        return 0 < self._every_s <= self._clock() - self._saved_at

    def attempted(self, step: int, *, is_finite: bool) -> None:
        """A checkpoint after ``step`` completed steps is being written, or is not, because a weight is not finite."""
        if is_finite:
            self.saved_step, self._diverged_step = step, None
        else:
            self._diverged_step = step
        self._saved_at = self._clock()

    def due_at_end(self, step: int) -> bool:
        """Whether a run that ends after ``step`` completed steps still needs its last checkpoint."""
        return step not in (self.saved_step or 0, self._diverged_step)

    @property
    def newest_path(self) -> str | None:
        """Path of the newest checkpoint; None if the run has no checkpoint."""
        return None if self.saved_step is None else checkpoint_path(self.saved_step)

    @property
    def divergence(self) -> str | None:
        """Why the last checkpoint that was due was not written; None if it was."""
        if self._diverged_step is None:
            return None
        return f"a weight is not finite after step {self._diverged_step:,}; {DIVERGED_HINT}"
