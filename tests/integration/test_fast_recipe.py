"""The recipe cifar10-fast: N workers compute what one does, also after a resume, with its network and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain import models, recipes
from raytrain.runs.documents import run_store
from raytrain.training.checkpoint import read_checkpoint
from tests.helpers.folder_runs import FolderRun, Weights, folder_run, largest_difference, train_runs

SMALLER = {"image_size": (12, 12), "batch_size": 30, "epochs": 2, "warmup_epochs": 0.5, "learning_rate": 0.05}
NOT_THE_RECIPES = ("data", "test_data", "storage", "name", "workers", "log_every")


def fast_run(images: Path, storage: Path, name: str, **options: Any) -> FolderRun:
    recipe = {key: value for key, value in vars(recipes.cifar10_fast()).items() if key not in NOT_THE_RECIPES}
    return folder_run(images, storage, name, **{**recipe, **SMALLER, "precision": "float64", **options})


def average(storage: Path, name: str) -> Weights:
    return read_checkpoint(run_store(str(storage), name), "checkpoints/step-000000006.pt").state["average"]


@pytest.mark.slow
def test_the_weights_are_the_same_on_any_number_of_workers_and_after_a_resume(images: Path, tmp_path: Path) -> None:
    (alone,) = train_runs(1, fast_run(images, tmp_path, "alone"))
    train_runs(2, fast_run(images, tmp_path, "stopped", stop_after=3))
    (resumed,) = train_runs(3, fast_run(images, tmp_path, "stopped"))
    assert largest_difference(alone, resumed) < 1e-10
    assert largest_difference(average(tmp_path, "alone"), average(tmp_path, "stopped")) < 1e-10
    start = models.cifar10_fast(num_classes=3, channels=3).state_dict()
    frozen = {name for name, value in alone.items() if torch.equal(value, start[name].to(value.dtype))}
    assert frozen == {"0.weight"}  # the whitening
