"""The optimizer that a configuration names."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from raytrain.config import TrainConfig
from raytrain.training.transfer import parameter_groups


def build_optimizer(config: TrainConfig, model: nn.Module, num_classes: int) -> Optimizer:
    """SGD with momentum or AdamW over what learns in ``model``, at the peak learning rate, times its factor for the head."""
    rate, decay = config.learning_rate or 0.0, config.weight_decay
    groups = parameter_groups(model, num_classes, rate, config.head_learning_rate_factor)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, weight_decay=decay)
