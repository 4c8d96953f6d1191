"""Runs in storage as a stranger may hand them over: made here without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from raytrain.config import TrainConfig
from raytrain.recipes import digits
from raytrain.runs.documents import CLAIM, CLASSES, run_store, write_config
from raytrain.runs.outcome import Progress
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.store import Store
from raytrain.training.checkpoint import Checkpoints, Identity

ANIMALS = ("cat", "dog", "fox")


def options(**more: Any) -> TrainConfig:
    return digits(mean=(0.2,), std=(0.3,), image_size=(20, 12), **more)


def make_run(storage: Path | str, config: TrainConfig, name: str = "first") -> Store:
    """The documents of a run that stopped."""
    store = run_store(str(storage), name)
    resolved = config.resolve(name=name, num_workers=1, device="cpu", mean=config.mean or (), std=config.std or ())
    write_config(store, resolved)
    write_status(store, RunStatus(status="stopped", step=1, num_steps=10, epoch=1, num_epochs=2))
    return store


def add_checkpoint(store: Store, model: nn.Module, config: TrainConfig, classes: Sequence[str] = ANIMALS) -> None:
    store.put(CLASSES, json.dumps(classes).encode())
    checkpoints = Checkpoints(store, Identity(config.model, tuple(classes), "", 128, 0), keep=1)
    checkpoints.save({"model": model.state_dict()}, Progress(step=1))
    checkpoints.close()


def contents(store: Store) -> dict[str, bytes]:
    """Return all documents but the claim, which its owner renews."""
    return {found.path: store.get(found.path) for found in store.list() if found.path != CLAIM}
