"""Runs to which something happens: how they are started, and what is left of them in storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from raytrain.runs.documents import open_run
from raytrain.runs.records import read_run
from raytrain.runs.stored_checkpoints import list_checkpoints
from raytrain.training.checkpoint import read_checkpoint
from tests.helpers.waiting import DEADLINE_S


def command(images: Path, storage: Path, *more: str) -> list[str]:
    """Return the command that trains the run of ``small_runs.config``; ``more`` are further words of it."""
    options = {
        "data": images,
        "storage": storage,
        "name": "run",
        "model": "tests.helpers.memory_runs:network",
        "batch-size": 20,
        "workers": 2,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    numbers = ["--image-size", "12", "12", "--learning-rate", "0.05", "--precision", "float64", "--log-every", "1"]
    numbers += ["--mean", "0.4", "0.4", "0.4", "--std", "0.2", "0.2", "0.2"]
    augmentation = ["--flip", "random", "--translate", "1"]
    return [sys.executable, "-m", "raytrain", "train", "custom", *words, *numbers, *augmentation, *more]


def summary_of(scenario: str, images: Path, storage: Path | str) -> dict[str, Any]:
    """Run a test helper module in its own process and cluster, and return the summary that it prints."""
    words = [sys.executable, "-m", scenario, str(images), str(storage)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read_steps(storage: Path) -> list[int]:
    """Return the steps of the run in its history."""
    return [row.step for row in read_run(str(storage), "run").metrics if row.kind == "step"]


def whole_steps(storage: str) -> list[int]:
    """Read all checkpoints of the run, and return their steps."""
    store = open_run(storage, "run")
    return [read_checkpoint(store, found.path).progress.step for found in list_checkpoints(store)]


class Ballast:
    """State large enough that a checkpoint needs a multipart upload."""

    def __init__(self) -> None:
        self.state = {"ballast": torch.zeros(16 << 20, dtype=torch.uint8)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
