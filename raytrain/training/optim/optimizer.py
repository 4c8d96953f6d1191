"""The optimizer that the options name, its groups of parameters, and the norm of its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain.config import ResolvedConfig
from raytrain.errors import UsageError
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
        scales = _layer_scales(model, config.layer_decay)
        groups = [part for group in groups for part in _split_by_layer(group, scales, rate)]
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


def _layer_scales(model: nn.Module, decay: float) -> dict[Tensor, float]:
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


def _split_by_layer(group: dict[str, Any], scales: dict[Tensor, float], learning_rate: float) -> list[dict[str, Any]]:
    """An optimizer's group, whose default is ``learning_rate``, as a group for each scale, the largest first."""
    rate = group.get("lr", learning_rate)
    params: list[Tensor] = group["params"]
    return [
        {**group, "params": [each for each in params if scales[each] == scale], "lr": rate * scale}
        for scale in sorted({scales[each] for each in params}, reverse=True)
    ]


def clip_gradients(optimizer: Optimizer, max_norm: float) -> None:
    """Scale the gradients down to the Euclidean norm ``max_norm`` over all parameters, if theirs is larger."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_norm)
