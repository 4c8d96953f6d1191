"""Gradient checkpointing: blocks are computed twice, and the weights and running statistics stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from raytrain.errors import UsageError
from raytrain.training.networks.model import build_model
from raytrain.training.prepared_models import checkpoint_gradients
from tests.helpers.folder_runs import folder_run, largest_difference, train_here, train_runs

pytestmark = pytest.mark.not_quick

NETWORK: dict[str, Any] = {"model": "tests.unit.test_gradient_checkpointing:network", "epochs": 1, "ema_decay": 0.9}


class Block(nn.Module):
    """A residual block with batch norm and dropout, which counts how often it is computed in training."""

    num_forwards = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.3)
        )

    def forward(self, input: Tensor) -> Tensor:
        Block.num_forwards += self.training
        return input + self.layers(input)


class Unwilling(nn.Module):
    """Refuses as networks of timm do that have no blocks."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        assert not enable, "gradient checkpointing not supported"


def network(num_classes: int, channels: int) -> nn.Module:
    blocks = [Block(6), nn.MaxPool2d(2), Block(6), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(6, num_classes))


@pytest.mark.parametrize("options", [{}, {"batch_norm": "aggregate"}, {"accumulate": 2}])
def test_the_weights_are_the_same_with_and_without(options: dict[str, Any], images: Path, tmp_path: Path) -> None:
    Block.num_forwards = 0
    plain, _ = train_here(folder_run(images, tmp_path, "plain", **NETWORK, **options))
    num_forwards = Block.num_forwards
    twice, _ = train_here(folder_run(images, tmp_path, "twice", **NETWORK, **options, gradient_checkpointing=True))
    assert largest_difference(plain, twice) < 1e-12
    assert Block.num_forwards == 3 * num_forwards > 0


def test_the_weights_are_the_same_on_several_workers(images: Path, tmp_path: Path) -> None:
    alone, _ = train_here(folder_run(images, tmp_path, "alone", **NETWORK))
    (three,) = train_runs(3, folder_run(images, tmp_path, "three", **NETWORK, gradient_checkpointing=True))
    assert largest_difference(alone, three) < 1e-10


def test_networks_of_timm_do_it_themselves(images: Path, tmp_path: Path) -> None:
    common = {"model": "timm:test_resnet", "epochs": 1, "image_size": (32, 32)}
    plain, _ = train_here(folder_run(images, tmp_path, "plain", **common))
    twice, _ = train_here(folder_run(images, tmp_path, "twice", **common, gradient_checkpointing=True))
    assert largest_difference(plain, twice) < 1e-12


def test_blocks_are_found_in_networks_of_torchvision() -> None:
    model = checkpoint_gradients(build_model("resnet18", 3, 3, 0))
    changed = [layer for layer in model.modules() if "forward" in vars(layer)]
    assert len(changed) == 8 and all(isinstance(layer, BasicBlock) for layer in changed)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        model(torch.zeros(2, 3, 64, 64))
    assert len(kept) < 40  # of some 180


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(
        UsageError, match="--gradient-checkpointing computes blocks of layers again, and the network has"
    ):
        checkpoint_gradients(build_model("alexnet", 3, 3, 0))
    with pytest.raises(UsageError, match="the network refuses it"):
        checkpoint_gradients(Unwilling())
