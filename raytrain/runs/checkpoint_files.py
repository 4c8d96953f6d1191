"""Checkpoints by name, and what a resumed run must have in common with them."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from operator import itemgetter
from typing import Any, cast

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.documents import CHECKPOINTS, matches, read_json
from raytrain.storage.store import Store, StoredObject


@dataclass(frozen=True)
class Identity:
    """What a run and its checkpoints are made of; ``batch_size`` is as it is typed if it depends on the workers."""

    labels_digest: str = field(default="", kw_only=True)  # first: with other labels, the classes may be others, too
    model: str
    classes: tuple[str, ...]
    manifest_digest: str
    batch_size: int | str | None
    seed: int
    sampling: str = "uniform"

    @classmethod
    def of(cls, config: TrainConfig, classes: tuple[str, ...] = (), digest: str = "", labels: str = "") -> Identity:
        """The identity of a run with these options and images; without images, as far as the options show it."""
        model, batch_size, seed = config.model, config.batch_size, config.seed
        return cls(model, classes, digest, batch_size, seed, config.sampling, labels_digest=labels)

    def check(self, other: Identity, what: str) -> None:
        """Raise UsageError with the first difference if ``what``, a run or a checkpoint, has the identity ``other``."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if theirs != mine:
                raise UsageError(
                    f"{what} was made with {_difference(name, theirs, mine)}: resume with the options that it was made "
                    "with, or start a new run under another --name."
                )


def _difference(name: str, theirs: Any, mine: Any) -> str:
    if name == "labels_digest":
        their, my = (f"{each[:8]}…" if each else "none, but class folders" for each in (theirs, mine))
        return f"other labels (digest {their}), and --labels has {my}"
    if name == "classes":
        pairs = enumerate(zip_longest(theirs, mine, fillvalue="none"))
        place, their, my = next((place, *pair) for place, pair in pairs if pair[0] != pair[1])
        numbers = f"{len(theirs):,} classes, and this run has {len(mine):,}"
        return f"{numbers}, of which number {place} is {their} there and {my} here"
    if name == "manifest_digest":
        return f"other images (manifest {theirs[:8]}…), and this run has those of manifest {mine[:8]}…"
    return f"{name.replace('_', ' ')} {theirs}, and this run has {mine}"


_CHECKPOINT = re.compile(re.escape(CHECKPOINTS) + r"step-(\d{9})(?:-(\d+))?\.pt")


def checkpoint_path(step: int, takeover: int = 0) -> str:
    """Path of the checkpoint after ``step`` completed steps, relative to the run.

    Owners since ``takeover``, the number of one that took over the run, use names of their own: what the one before
    still writes or deletes is none of theirs.
    """
    return f"{CHECKPOINTS}step-{step:09d}{f'-{takeover}' if takeover else ''}.pt"


def step_and_takeover(path: str) -> tuple[int, int]:
    """The inverse of :func:`checkpoint_path`."""
    found = _CHECKPOINT.fullmatch(path)
    assert found is not None
    return int(found[1]), int(found[2] or 0)


def list_checkpoints(store: Store) -> list[StoredObject]:
    """The run's checkpoints, oldest first; those since a takeover are newer than all before it."""
    found = (stored for stored in store.list(CHECKPOINTS) if _CHECKPOINT.fullmatch(stored.path))
    return sorted(found, key=lambda stored: step_and_takeover(stored.path)[::-1])


def newest_checkpoint(store: Store) -> str | None:
    """Path of the newest checkpoint; None if there is none."""
    return next((found.path for found in reversed(list_checkpoints(store))), None)


def best_checkpoint(store: Store) -> str | None:
    """Path of the checkpoint with the highest score by ``--best``; of the newest one if none was evaluated."""
    best = best_scored_checkpoint(store)
    return best and best[1]


def best_scored_checkpoint(store: Store) -> tuple[float, str] | None:
    """Score and path of the best checkpoint; the score is that of ``--best``, negative if it is a loss, or -inf."""
    newest_first = (found.path for found in reversed(list_checkpoints(store)))
    return max(((_score(store, path), path) for path in newest_first), key=itemgetter(0), default=None)


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
    newest = newest_checkpoint(store)
    return step_and_takeover(newest)[0] if newest else 0


def stored_thresholds(store: Store, checkpoint: str, num_classes: int) -> list[float] | None:
    """The threshold of each class, chosen in the last evaluation before a checkpoint; None if there are none."""
    stored: object = read_json(store, f"{checkpoint}.json").get("thresholds")
    thresholds = cast(list[float], stored) if matches(stored, list[float]) else []
    return thresholds if len(thresholds) == num_classes else None


def _score(store: Store, checkpoint: str) -> float:
    score = read_json(store, f"{checkpoint}.json").get("score")
    return score if isinstance(score, float) and math.isfinite(score) else -math.inf
