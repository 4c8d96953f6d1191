"""The optimizer that a configuration names, its learning rate and its gradients' norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.errors import UsageError
from raytrain.training.optim import learning_rate as lr_schedule
from raytrain.training.optim.learning_rate import layer_scales, split_by_layer
from raytrain.training.transfer import body_and_head


def build_optimizer(config: ResolvedConfig, model: nn.Module, num_classes: int) -> Optimizer:
    """The optimizer of the trainable parameters of ``model``, at the peak learning rates.

    Raises what :func:`parameter_groups` raises.
    """
    rate, decay = config.learning_rate, config.weight_decay
    groups = parameter_groups(config, model, num_classes)
    if config.optimizer == "sgd":
        momentum = {"momentum": config.momentum, "nesterov": config.nesterov}
        return torch.optim.SGD(groups, lr=rate, weight_decay=decay, fused=True, **momentum)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=decay, fused=True)
    return _timm_optimizer(config.optimizer, groups, rate, decay)


def parameter_groups(config: ResolvedConfig, model: nn.Module, num_classes: int) -> list[dict[str, Any]]:
    """The trainable parameters of ``model``, in a group for each learning rate (``lr``) and weight decay of its own.

    Raises UsageError if the network lacks a head or layers that learn at a rate of their own.
    """
    rate = config.learning_rate
    groups = body_and_head(model, num_classes, rate, config.head_learning_rate_factor)
    if config.layer_decay < 1:
        scales = layer_scales(model, config.layer_decay)
        groups = [part for group in groups for part in split_by_layer(group, scales, rate)]
    if not config.decay_norms_and_biases:
        groups = [part for group in groups for part in _with_and_without_decay(group)]
    return groups


def _timm_optimizer(name: str, groups: list[dict[str, Any]], rate: float, decay: float) -> Optimizer:
    from timm.optim import Lamb, Lion  # pyright: ignore[reportPrivateImportUsage]

    if name == "lion":
        return Lion(groups, lr=rate, weight_decay=decay)
    return Lamb(groups, lr=rate, weight_decay=decay, max_grad_norm=None)  # --clip-norm alone clips


def _with_and_without_decay(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group's matrices and kernels, and apart from them its vectors, which are norms and biases, without decay."""
    vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
    others = [parameter for parameter in group["params"] if parameter.ndim >= 2]
    parts = [{**group, "params": others}, {**group, "params": vectors, "weight_decay": 0.0}]
    return [part for part in parts if part["params"]]


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
        factor = lr_schedule.factor(self._config, step, self._plan.steps_per_epoch, self._plan.num_steps)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor if learning_rate is None else learning_rate
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


def clip_gradients(optimizer: Optimizer, max_norm: float) -> None:
    """Scale the gradients down to the Euclidean norm ``max_norm`` over all parameters, if theirs is larger."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_norm)
