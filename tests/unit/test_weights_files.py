"""Files of weights as other trainers save them are read for `--weights`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.training.transfer import initial_weights

Weights = dict[str, Tensor]


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: value for name, value in weights.items()}


@pytest.mark.parametrize(
    "save",
    [
        lambda weights: weights,
        lambda weights: {"state_dict": weights, "epoch": 3, "optimizer": {"state": {}}},
        lambda weights: {"model": weights, "args": {"lr": 0.1}},
        lambda weights: {"model_state_dict": prefixed("module.")(weights)},
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("_orig_mod.module."),
        lambda weights: {"state_dict": prefixed("model.")(weights), "pytorch-lightning_version": "2.0"},
        lambda weights: {**prefixed("module.")(weights), "n_averaged": torch.tensor(7)},
    ],
)
def test_weights_of_other_trainers_are_read(save: Callable[[Weights], Any], tmp_path: Path) -> None:
    weights = {"conv.weight": torch.ones(2), "fc.bias": torch.zeros(3)}
    torch.save(save(weights), tmp_path / "weights.pt")
    config = TrainConfig(weights=str(tmp_path / "weights.pt"), batch_size=1)
    read = initial_weights(config, ("a", "b"), first_step=0)
    assert read is not None
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {"state_dict": {"a": "b"}}])
def test_files_without_weights_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="holds no state_dict"):
        initial_weights(TrainConfig(weights=str(tmp_path / "weights.pt"), batch_size=1), ("a", "b"), first_step=0)


def test_names_that_differ_are_left_alone(tmp_path: Path) -> None:
    weights = {"model.conv": torch.ones(2), "fc": torch.zeros(3)}
    torch.save(weights, tmp_path / "weights.pt")
    read = initial_weights(TrainConfig(weights=str(tmp_path / "weights.pt"), batch_size=1), ("a", "b"), first_step=0)
    assert read is not None and set(read) == set(weights)
