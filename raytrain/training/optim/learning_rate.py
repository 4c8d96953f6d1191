"""The learning rate of every step, and of layers nearer to the images."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from raytrain.config import TrainConfig
from raytrain.errors import UsageError


def layer_scales(model: nn.Module, decay: float) -> dict[Tensor, float]:
    """The factor of the learning rate of each parameter: 1 in the last layer, and ``decay`` times that in each before.

    Clark et al. 2020 (ELECTRA), as in BEiT and timm: the network itself says which parameters make a layer, with its
    method ``group_matcher``. Raises UsageError if it has none.
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


def split_by_layer(group: dict[str, Any], scales: dict[Tensor, float], learning_rate: float) -> list[dict[str, Any]]:
    """An optimizer's group, whose default is ``learning_rate``, as a group for each scale, the largest first."""
    rate = group.get("lr", learning_rate)
    params: list[Tensor] = group["params"]
    return [
        {**group, "params": [each for each in params if scales[each] == scale], "lr": rate * scale}
        for scale in sorted({scales[each] for each in params}, reverse=True)
    ]


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
