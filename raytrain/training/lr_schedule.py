"""The learning rate of every step, as a pure function of the options and the step."""

from __future__ import annotations

import math

from raytrain.config import TrainConfig


def factor(config: TrainConfig, step: int, steps_per_epoch: int, num_steps: int) -> float:
    """The factor, 0 to 1, of the peak learning rate at ``step`` (counted from 0) of ``num_steps``.

    A linear warm-up of n steps starts at 1/n and reaches 1 in its last step. ``piecewise`` counts its epochs from the
    start of the run. ``cosine`` (Loshchilov and Hutter 2017, without restarts) and ``linear`` fall from the end of the
    warm-up to 0 just after the last step.
    """
    num_warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < num_warmup:
        return (step + 1) / num_warmup
    schedule = config.learning_rate_schedule
    if schedule.shape == "piecewise":
        return schedule.factor ** (step // steps_per_epoch // schedule.period)
    done = (step - num_warmup) / max(num_steps - num_warmup, 1)
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if schedule.shape == "linear":
        return 1 - done
    return 1.0
