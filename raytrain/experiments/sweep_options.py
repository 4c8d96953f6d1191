"""Options of a sweep beside `--vary`: how its points are chosen, which trials stop early, and what --notify reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain.config.option_values import read_values

Sampler = Literal["grid", "random", "tpe", "cmaes", "gp", "qmc"]
"""Who chooses the points: every combination, chance, or a sampler of Optuna's."""
Pruner = Literal["median", "successive-halving", "hyperband"]
"""A pruner of Optuna's, which stops trials that are worse than others."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How a sweep chooses its points, and how long its trials train.

    Raises UsageError if a value is not of its type, or no word that it may be.
    """

    trials: int | None = None
    """Points to choose; by default every combination of values."""
    sampler: Sampler | None = None
    """How points are chosen: grid, all combinations (default without --trials), random (default with it), or a sampler
    of Optuna's, which uses the results so far."""
    pruner: Pruner | None = None
    """Pruner of Optuna's that stops trials early, in place of --early-stopping."""
    folds: int | None = None
    """Cross-validation: train each point on this many folds, in turn; gives mean and deviation."""
    early_stopping: bool = True
    """Stop trials that are in the worse half, after an eighth of the epochs at the earliest."""
    target: float | None = None
    """With --vary workers=1,2,4: compare the time to this value of --best; by default one 5 % worse than the best."""
    notify_trials: bool = False
    """Have --notify report how each trial ends, too, not only the sweep."""

    def __post_init__(self) -> None:
        # A program may give values of any type and any word, such as sampler="TPE".
        read_values(self)
