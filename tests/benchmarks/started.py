"""Write down when a worker has started. Imports almost nothing, because its import time is part of the measurement."""

from __future__ import annotations

import os
import time
from typing import Any

NOTES = "RAYTRAIN_BENCHMARK_NOTES"
"""The environment variable with the path of the file for the times."""


def note() -> None:
    """Append the current time to the file."""
    with open(os.environ[NOTES], "a") as notes:
        notes.write(f"{time.time()}\n")


def network(num_classes: int, channels: int) -> Any:
    """Build the network of the recipe cifar10, and note the time after this process's first optimizer step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from raytrain.models import cifar10

    first = iter([note])  # a hook that removed itself would end torch's loop over all of them with an error
    register_optimizer_step_post_hook(lambda *_: next(first, lambda: None)())
    return cifar10(num_classes, channels)


def network_of_steps(num_classes: int, channels: int) -> Any:
    """Build the network of the recipe cifar10, and note the time after each of this process's optimizer steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from raytrain.models import cifar10

    register_optimizer_step_post_hook(lambda *_: note())
    return cifar10(num_classes, channels)
