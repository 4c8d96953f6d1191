"""Options of the run itself: its name and place, and what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.config.limits import PositiveInt


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run and its records."""

    name: str | None = None
    """Name of the run; by default the recipe's name and the time."""
    storage: str = "./runs"
    """Where runs are stored: a folder or a URL (s3://…, gs://…, az://…)."""
    resume: bool = False
    """Continue the run called --name from its last checkpoint, with its own options; start it if it does not exist."""
    recipe: str = "custom"
    """Name of the recipe that these options started from."""
    loop: str | None = None
    """Your own training loop: file.py:function or package.module:function, which is called with the run."""
    seed: int = 0
    """Seed of the initial weights, the sample order, the augmentation and the train/test split."""
    log_every: PositiveInt = 10
    """Steps between rows of the metrics history."""
    track: tuple[str, ...] = ()
    """Where else to send metrics: tensorboard, mlflow, wandb, prometheus, or package.module:Class of your own."""
    tag: tuple[str, ...] = ()
    """Words to find the run by, with `raytrain runs --filter tag=WORD`."""
    note: str | None = None
    """What the run is about, for whoever looks at it later."""
    trace: bool = False
    """Record which samples each worker used in each step, for `raytrain audit`."""
