"""When a checkpoint is due, by steps, epochs and seconds."""

from __future__ import annotations

import time

from raytrain.config import TrainConfig
from raytrain.runs.outcome import DIVERGED_HINT


class CheckpointSchedule:
    """Knows the step of the newest checkpoint, ``saved_step`` or None, and whether the next one is due."""

    def __init__(self, config: TrainConfig, steps_per_epoch: int, saved_step: int | None) -> None:
        self.saved_step = saved_step
        self._diverged: tuple[int, str] | None = None  # step of a later checkpoint that was left out, and the weight
        every = config.checkpoint_intervals
        self._every_steps = (every.steps, every.epochs * steps_per_epoch)
        self._every_s = every.seconds
        self._saved_at = time.monotonic()

    def due_at(self, step: int) -> bool:
        """Return whether the options ask for a checkpoint after ``step`` completed steps."""
        return any(every > 0 and step % every == 0 for every in self._every_steps)

    def due_by_time(self) -> bool:
        """Return whether the last checkpoint, or the start of the run, is too many seconds ago."""
        return 0 < self._every_s <= time.monotonic() - self._saved_at

    def due_at_end(self, step: int) -> bool:
        """Return whether a run that ends after ``step`` completed steps still needs its last checkpoint."""
        return step not in (self.saved_step or 0, self._diverged and self._diverged[0])

    def attempted(self, step: int, not_finite: str | None = None) -> None:
        """Note that a checkpoint after ``step`` completed steps is being written, or left out.

        It is left out if a weight is not finite, whose name is ``not_finite``.
        """
        if not_finite is None:
            self.saved_step, self._diverged = step, None
        else:
            self._diverged = step, not_finite
        self._saved_at = time.monotonic()

    def forget_checkpoint(self) -> None:
        """Note that the newest checkpoint lacks something, so that another one is due at the end."""
        self.saved_step = self._diverged = None

    @property
    def divergence(self) -> str | None:
        """Why the last checkpoint that was due was left out; None if it was written."""
        if self._diverged is None:
            return None
        step, name = self._diverged
        return f"the weight {name} is not finite after step {step:,}; {DIVERGED_HINT}"
