"""Notes that a worker has started. Imports next to nothing: its own start is part of what is measured."""

from __future__ import annotations

import os
import time
from typing import Any

NOTES = "RAYTRAIN_BENCHMARK_NOTES"
"""The environment variable that names the file for the notes of a measurement."""


def note() -> None:
    """Note the time."""
    with open(os.environ[NOTES], "a") as notes:
        notes.write(f"{time.time()}\n")


def network(num_classes: int, channels: int) -> Any:
    """The network of the recipe cifar10, in a process that notes when its first optimizer step is done."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from raytrain.models import cifar10

    def note_first(*_: object) -> None:
        hook.remove()
        note()

    hook = register_optimizer_step_post_hook(note_first)
    return cifar10(num_classes, channels)
