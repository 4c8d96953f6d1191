"""The checkpoint files of a run, by name alone: torch is not needed to find the newest or the best one."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, cast

from raytrain.errors import UsageError
from raytrain.runs.documents import read_json
from raytrain.runs.layout import CHECKPOINTS
from raytrain.runs.stored_values import matches

if TYPE_CHECKING:
    from raytrain.storage.base import Store, StoredObject

_CHECKPOINT = re.compile(r"step-(\d{9})\.pt$")


def checkpoint_path(step: int) -> str:
    """Path of the checkpoint after ``step`` completed steps, relative to the run."""
    return f"{CHECKPOINTS}step-{step:09d}.pt"


def list_checkpoints(store: Store) -> list[StoredObject]:
    """The run's checkpoints, oldest first."""
    found = (stored for stored in store.list(CHECKPOINTS) if _CHECKPOINT.search(stored.path))
    return sorted(found, key=lambda stored: stored.path)


def newest_checkpoint(store: Store) -> str | None:
    """Path of the newest checkpoint; None if there is none."""
    return max((found.path for found in list_checkpoints(store)), default=None)


def best_checkpoint(store: Store) -> str | None:
    """Path of the checkpoint with the highest score by ``--best``; of the newest one if none was evaluated."""
    paths = [found.path for found in list_checkpoints(store)]
    return max(((_score(store, path), path) for path in paths), default=(0.0, None))[1]


def require_checkpoint(store: Store, run: str) -> str:
    """Path of the run's best checkpoint, the newest one if none was evaluated. Raises UsageError if there is none."""
    checkpoint = best_checkpoint(store)
    if checkpoint is None:
        raise UsageError(
            f"Run {run!r} has no checkpoint yet; it writes one after its first epoch, and when it is stopped."
        )
    return checkpoint


def newest_step(store: Store) -> int:
    """The step from which the run would resume: that of its newest checkpoint, 0 without one."""
    names = (_CHECKPOINT.search(stored.path) for stored in store.list(CHECKPOINTS))
    return max((int(found[1]) for found in names if found), default=0)


def stored_thresholds(store: Store, checkpoint: str, num_classes: int) -> list[float] | None:
    """The threshold of each class, chosen in the last evaluation before a checkpoint; None if there are none."""
    stored: object = read_json(store, f"{checkpoint}.json").get("thresholds")
    thresholds = cast(list[float], stored) if matches(stored, list[float]) else []
    return thresholds if len(thresholds) == num_classes else None


def _score(store: Store, checkpoint: str) -> float:
    score = read_json(store, f"{checkpoint}.json").get("score")
    return score if isinstance(score, float) and math.isfinite(score) else -math.inf
