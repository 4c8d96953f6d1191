"""Builds the optimizer and the learning-rate schedule that the options ask for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.errors import UsageError
from raytrain.training.exact.gradients import parameters_of
from raytrain.training.networks.transfer import head_parameters


def build_optimizer(config: ResolvedConfig, model: nn.Module, num_classes: int) -> Optimizer:
    """Return the optimizer that ``config`` names, of the trainable parameters of ``model``, at the peak learning rates.

    Raises UsageError if there is no such parameter, and as :func:`parameter_groups` does.

    Example::

        optimizer = build_optimizer(config, model, num_classes=10)
        scheduler = build_scheduler(config, plan, optimizer)
    """
    rate, decay = config.learning_rate, config.weight_decay
    groups = parameter_groups(config, model, num_classes)
    if not groups:
        raise UsageError("The network has no parameter to train: it has none, or all are frozen; unfreeze some.")
    fused = not any(weight.is_complex() for weight in model.parameters())  # torch's fused kernels are for real numbers
    if config.optimizer == "sgd":
        momentum, nesterov = config.momentum, config.nesterov
        optimizer = torch.optim.SGD(
            groups, lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, fused=fused
        )
        if momentum:
            optimizer.register_step_pre_hook(_begin_momentum)
        return optimizer
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=decay, fused=fused)
    # The others are timm's, which comes with an extra of raytrain and is imported only if it is used.
    from timm.optim import Lamb, Lion  # pyright: ignore[reportPrivateImportUsage]

    if config.optimizer == "lion":
        return Lion(groups, lr=rate, weight_decay=decay)
    # timm's Lamb would clip gradients itself; here only --clip-norm does.
    return Lamb(groups, lr=rate, weight_decay=decay, max_grad_norm=None)


def _begin_momentum(optimizer: Optimizer, *_: object) -> None:
    """Set the momentum of weights that have none yet to zeros, before a step.

    Torch's fused SGD leaves it uninitialised if the first gradients are infinite, as they may be in float16. This hook
    is at the top of the module so that an optimizer that has it can be copied.
    """
    for weight in parameters_of(optimizer):
        if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def parameter_groups(config: ResolvedConfig, model: nn.Module, num_classes: int) -> list[dict[str, Any]]:
    """Return the trainable parameters of ``model`` in groups, one for each learning rate (``lr``) and weight decay.

    The body comes before the head, layers that learn faster before others, and matrices and kernels before vectors,
    which are norms and biases. Raises UsageError if an option concerns the head or single layers, and the network does
    not say which they are.
    """
    # Each parameter learns at the rate of the head or of the body, times the scale of its layer.
    head_factor = config.head_learning_rate_factor
    parameters_of_head = set[Tensor]()
    if head_factor != 1:
        parameters_of_head = head_parameters(model, num_classes, f"--head-learning-rate-factor {head_factor:g}")
    if config.head_epochs:
        head_parameters(model, num_classes, f"--head-epochs {config.head_epochs}")  # raises UsageError without a head
    scales = _layer_scales(model, config.layer_decay) if config.layer_decay < 1 else {}
    # The key of a group: whether it is of the head, its scale, whether it has no decay. Sorted, the keys are in the
    # order of the groups; the scale is negated so that larger scales come first.
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            no_decay = parameter.ndim < 2 and not config.decay_norms_and_biases
            key = (parameter in parameters_of_head, -scales.get(parameter, 1.0), no_decay)
            groups.setdefault(key, []).append(parameter)
    rate, decay = config.learning_rate, config.weight_decay
    return [
        {
            "params": groups[is_head, minus_scale, no_decay],
            "lr": (rate * head_factor if is_head else rate) * -minus_scale,
            "weight_decay": 0.0 if no_decay else decay,
        }
        for is_head, minus_scale, no_decay in sorted(groups)
    ]


def _layer_scales(model: nn.Module, decay: float) -> dict[Tensor, float]:
    """Return the factor of the learning rate of each parameter: 1 in the last layer, ``decay`` in the one before, …

    It is ``decay`` to the power of the number of layers that follow: layer-wise decay of Clark et al. 2020 (ELECTRA),
    as in BEiT and timm. Raises UsageError if the network has no method ``group_matcher``, as those of timm have, which
    says the order of the layers and their parameters.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise UsageError(
            f"--layer-decay is {decay:g}, and the network does not say how its layers follow each other, as those of "
            "timm do; take one of these (--model timm:NAME), or leave the decay at 1."
        )
    from timm.models import group_parameters

    layer_of: Any = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layer_of.values())
    return {parameter: decay ** (last - layer_of[name]) for name, parameter in model.named_parameters()}


def build_scheduler(config: TrainConfig, plan: BatchPlan, optimizer: Optimizer) -> LRScheduler:
    """Return a scheduler that multiplies the peak learning rates of ``optimizer`` by :func:`learning_rate_factor`.

    Its ``step()`` is called after each batch. In a search for a learning rate (``--schedule rising``) it changes
    nothing, because the run raises the rates itself.
    """

    def factor_of_step(step: int) -> float:
        if config.is_range_test:
            return 1.0
        return learning_rate_factor(config, step, plan.steps_per_epoch, plan.num_steps)

    return LambdaLR(optimizer, factor_of_step)


def learning_rate_factor(config: TrainConfig, step: int, steps_per_epoch: int, num_steps: int) -> float:
    """Return the factor, 0 to 1, by which the peak learning rate is multiplied at ``step`` of ``num_steps``.

    ``step`` is counted from 0.

    A linear warm-up of n steps starts at 1/n and reaches 1 in its last step. ``piecewise`` counts its epochs from the
    start of the run. ``cosine`` (Loshchilov and Hutter 2017, without restarts) and ``linear`` fall from the end of the
    warm-up to 0 just after the last step.

    If the head learns alone at first, those epochs start with a warm-up, and then the factor stays 1. After them, the
    schedule starts as if the run began then, because the other layers have no momentum yet.
    """
    # Both the epochs of the head alone and those after them begin with a warm-up.
    num_warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    num_head_steps = config.head_epochs * steps_per_epoch
    is_head_alone = step < num_head_steps
    if not is_head_alone:
        step, num_steps = step - num_head_steps, num_steps - num_head_steps
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if is_head_alone:
        return 1.0

    # The shape of the schedule after the warm-up.
    schedule = config.learning_rate_schedule
    if schedule.shape == "piecewise":
        return schedule.factor ** (step // steps_per_epoch // schedule.period)
    done_fraction = (step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1)
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * done_fraction)) / 2
    if schedule.shape == "linear":
        return 1 - done_fraction
    return 1.0


def rising_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0, in a search for one over ``num_steps``.

    It is low · (high / low) ^ (step / (num_steps - 1)): from step to step, it rises by the same factor.
    """
    low, high = config.learning_rate_schedule.rates
    return low * (high / low) ** (step / max(num_steps - 1, 1))
