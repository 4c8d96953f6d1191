"""When a checkpoint is due: after so many steps, epochs or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from raytrain.config import TrainConfig


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
        self._every_steps = (config.checkpoint_every_steps, config.checkpoint_every_epochs * steps_per_epoch)
        self._every_s = config.checkpoint_every_s
        self._clock = clock
        self._saved_at = clock()

    def due_at(self, step: int) -> bool:
        """Whether the options ask for a checkpoint after ``step`` completed steps."""
        return any(every > 0 and step % every == 0 for every in self._every_steps)

    def due_by_time(self) -> bool:
        """Whether the last checkpoint, or the start of the run, is too many seconds ago."""
        return 0 < self._every_s <= self._clock() - self._saved_at

    def saved(self, step: int) -> None:
        """A checkpoint after ``step`` completed steps is being written."""
        self.saved_step = step
        self._saved_at = self._clock()
