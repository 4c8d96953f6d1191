"""Decides when a checkpoint is due, by the steps, epochs and seconds of ``--checkpoint-every``."""

from __future__ import annotations

import time

from raytrain.config import TrainConfig
from raytrain.runs.outcome import DIVERGED_HINT


class CheckpointSchedule:
    """Keeps the step of the newest checkpoint, ``saved_step``, and decides whether the next one is due.

    ``saved_step`` is None without a checkpoint. :meth:`note_checkpoint` is called for each checkpoint.
    """

    def __init__(self, config: TrainConfig, steps_per_epoch: int, saved_step: int | None) -> None:
        self.saved_step = saved_step
        # If the last checkpoint was left out, its step, and the name of the weight that is not finite.
        self._diverged: tuple[int, str] | None = None
        every = config.checkpoint_intervals
        self._every_steps = (every.steps, every.epochs * steps_per_epoch)
        self._every_s = every.seconds
        self._saved_at = time.monotonic()

    def due_at(self, step: int) -> bool:
        """Return whether the options ask for a checkpoint after ``step`` completed steps."""
        return any(every > 0 and step % every == 0 for every in self._every_steps)  # 0: not by steps, or epochs

    def due_by_time(self) -> bool:
        """Return whether the last checkpoint, or the start of this attempt, is too many seconds ago."""
        return self._every_s > 0 and time.monotonic() - self._saved_at >= self._every_s

    def due_at_end(self, step: int) -> bool:
        """Return whether a run that ends after ``step`` completed steps still needs its last checkpoint.

        It does not after step 0, nor if the checkpoint of this step was written, or left out.
        """
        left_out_step = self._diverged[0] if self._diverged is not None else None
        return step not in (0, self.saved_step, left_out_step)

    def note_checkpoint(self, step: int, not_finite: str | None = None) -> None:
        """Note that a checkpoint after ``step`` completed steps is being written, or left out.

        It is left out if a weight is not finite, whose name is ``not_finite``. Both count as the last checkpoint.
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
