"""The optimizer that a configuration names, its learning rate and its gradients' norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from raytrain.config import ResolvedConfig
from raytrain.training.layer_decay import layer_scales, split_by_layer
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


def set_learning_rate(optimizer: Optimizer, learning_rate: float | None, factor: float) -> float:
    """Set the learning rate of all groups, by default each group's initial one times ``factor``; returns the first."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor if learning_rate is None else learning_rate
    return optimizer.param_groups[0]["lr"]


def clip_gradients(optimizer: Optimizer, max_norm: float) -> None:
    """Scale the gradients down to the Euclidean norm ``max_norm`` over all parameters, if theirs is larger."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_norm)
