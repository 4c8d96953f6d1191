"""The learning rate of every step, by ``--schedule`` or by the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.config import TrainConfig
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.errors import UsageError


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


class LearningRates:
    """The learning rates of a run's steps: those of the optimizers' groups, times the factor of ``--schedule``."""

    def __init__(self, config: TrainConfig, plan: BatchPlan) -> None:
        self._config, self._plan = config, plan
        self._is_scheduled = config.schedule != "constant" or config.warmup_epochs > 0
        self._prepared: dict[Optimizer, list[float]] = {}

    def prepared(self, thing: object) -> None:
        """The loop has prepared ``thing``; raises UsageError for a scheduler beside ``--schedule``."""
        if isinstance(thing, LRScheduler) and self._is_scheduled:
            raise self._two_schedules()
        if isinstance(thing, Optimizer):
            self._prepared[thing] = [group["lr"] for group in thing.param_groups]

    @contextmanager
    def of_step(self, optimizer: Optimizer, step: int, learning_rate: float | None) -> Iterator[float]:
        """In this context the groups have their rates of ``step``, by default those that they have times the factor.

        Gives the first group's. Raises UsageError if the loop has changed them although ``--schedule`` does, too.
        """
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        before = self._prepared.get(optimizer, rates)
        if self._is_scheduled and learning_rate is None and rates[: len(before)] != before:
            raise self._two_schedules()
        scale = factor(self._config, step, self._plan.steps_per_epoch, self._plan.num_steps)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale if learning_rate is None else learning_rate
        try:
            yield groups[0]["lr"]
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _two_schedules(self) -> UsageError:
        config = self._config
        return UsageError(
            f"The loop changes the learning rate, and so do --schedule {config.schedule} and --warmup-epochs "
            f"{config.warmup_epochs:g}; leave these at constant and 0, or the loop's own schedule out."
        )
