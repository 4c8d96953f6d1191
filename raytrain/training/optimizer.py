"""The optimizer that a configuration names, its learning rate and its gradients' norm."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from raytrain.config import ResolvedConfig
from raytrain.training.transfer import parameter_groups


def build_optimizer(config: ResolvedConfig, model: nn.Module, num_classes: int) -> Optimizer:
    """SGD with momentum or AdamW over the trainable parameters of ``model``, at the peak learning rates."""
    rate, decay = config.learning_rate, config.weight_decay
    groups = parameter_groups(model, num_classes, rate, config.head_learning_rate_factor)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, weight_decay=decay)


def set_learning_rate(optimizer: Optimizer, learning_rate: float | None, factor: float) -> float:
    """Set the learning rate of all groups, by default each group's initial one times ``factor``; returns the first."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor if learning_rate is None else learning_rate
    return optimizer.param_groups[0]["lr"]


def clip_gradients(optimizer: Optimizer, max_norm: float) -> None:
    """Scale the gradients down to the Euclidean norm ``max_norm`` over all parameters, if theirs is larger."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_norm)
