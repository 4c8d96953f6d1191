"""Checkpoints that a run has stored: their names, the newest and the best, and what a resume must share with them."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, cast

from raytrain.config import TrainConfig
from raytrain.config.option_values import matches
from raytrain.errors import UsageError, format_count
from raytrain.runs.documents import CHECKPOINTS, read_config, read_json
from raytrain.storage.store import Store, StoredObject


@dataclass(frozen=True)
class Identity:
    """Facts that must be the same when a run is resumed from its checkpoints.

    The digests are those of the data set's labels, if these come from a label file, and of its manifest; they are empty
    if the images are not known. ``batch_size`` is the number or the text that the user typed: ``32/worker`` is the same
    on any number of workers.
    """

    # The first difference is reported. Labels come first, because they may be why the classes differ.
    labels_digest: str = field(default="", kw_only=True)
    model: str
    classes: tuple[str, ...]
    manifest_digest: str
    batch_size: int | str | None
    seed: int
    sampling: str = "uniform"

    @classmethod
    def of(cls, config: TrainConfig, classes: tuple[str, ...] = (), digest: str = "", labels: str = "") -> Identity:
        """Return the identity of a run with these options and images; without images, what the options say of it.

        ``digest`` is that of the manifest, and ``labels`` that of the labels.
        """
        model, batch_size, seed = config.model, config.batch_size, config.seed
        return cls(model, classes, digest, batch_size, seed, config.sampling, labels_digest=labels)

    def check(self, other: Identity, subject: str) -> None:
        """Raise UsageError with the first difference if ``subject``, a run or a checkpoint, has the identity ``other``.

        Example: ``Identity.of(config).check(Identity.of(read_config(store)), "Run 'digits'")``
        """
        # The fields are compared in their order, and the first difference is reported.
        for name, mine in asdict(self).items():
            theirs: Any = getattr(other, name)
            if theirs == mine:
                continue
            # Digests and lists of classes are too long for a sentence: show their beginning, or the first difference.
            if name == "labels_digest":
                their, my = (f"{digest[:8]}…" if digest else "none, but class folders" for digest in (theirs, mine))
                difference = f"other labels (digest {their}), and --labels has {my}"
            elif name == "classes":
                pairs = enumerate(zip_longest(theirs, mine, fillvalue=""))  # no class has an empty name
                number, (their, my) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
                difference = (
                    f"{format_count(len(theirs), 'class')}, and this run has {len(mine):,}, of which number {number} "
                    f"is {their or 'missing'} there and {my or 'missing'} here"
                )
            elif name == "manifest_digest":
                difference = f"other images (manifest {theirs[:8]}…), and this run has those of manifest {mine[:8]}…"
            else:
                difference = f"{name.replace('_', ' ')} {theirs}, and this run has {mine}"
            raise UsageError(
                f"{subject} was made with {difference}: resume with the options that it was made with, or start a new "
                "run under another --name."
            )


_CHECKPOINT = re.compile(re.escape(CHECKPOINTS) + r"step-(\d{9})(?:-(\d+))?\.pt")


def checkpoint_path(step: int, takeover: int = 0) -> str:
    """Return the path of the checkpoint after ``step`` completed steps, relative to the run.

    ``takeover`` is that of the owner's claim: a number that each takeover from a silent owner changes, 0 before the
    first one (see :mod:`raytrain.runs.ownership`). So a late request of an earlier owner neither replaces nor deletes
    the checkpoints of its successors.

    Example: ``checkpoint_path(120, takeover=3) == "checkpoints/step-000000120-3.pt"``
    """
    return f"{CHECKPOINTS}step-{step:09d}{f'-{takeover}' if takeover else ''}.pt"


def step_and_takeover(path: str) -> tuple[int, int]:
    """Return the step and the takeover in the path of a checkpoint: the inverse of :func:`checkpoint_path`."""
    match = _CHECKPOINT.fullmatch(path)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def list_checkpoints(store: Store) -> list[StoredObject]:
    """Return the run's checkpoints, oldest first; all since a takeover count as newer than all before it."""
    checkpoints = (stored for stored in store.list(CHECKPOINTS) if _CHECKPOINT.fullmatch(stored.path))
    return sorted(checkpoints, key=lambda stored: step_and_takeover(stored.path)[::-1])


def newest_checkpoint(store: Store) -> str | None:
    """Return the path of the newest checkpoint; None if there is none."""
    return next((stored.path for stored in reversed(list_checkpoints(store))), None)


def newest_step(store: Store) -> int:
    """Return the number of steps after which the run would resume: that of its newest checkpoint, or 0 without one."""
    newest = newest_checkpoint(store)
    return step_and_takeover(newest)[0] if newest else 0


def best_checkpoint(store: Store) -> str | None:
    """Return the path of the checkpoint with the best score by ``--best``, or of the newest one if none has a score.

    None if there is no checkpoint.
    """
    best = best_scored_checkpoint(store)
    return best and best[1]


def best_scored_checkpoint(store: Store) -> tuple[float, str] | None:
    """Return the score and the path of the best checkpoint, the newest among equals; None without a checkpoint.

    The score is that of ``--best``: the larger the better, so that of a loss is negative. A checkpoint that was not
    evaluated has the score -inf.
    """
    # Newest first, so that the newest wins among equals.
    best: tuple[float, str] | None = None
    for stored in reversed(list_checkpoints(store)):
        value = read_json(store, f"{stored.path}.json").get("score")
        score = value if isinstance(value, float) and math.isfinite(value) else -math.inf
        if best is None or score > best[0]:
            best = score, stored.path
    return best


def require_checkpoint(store: Store, run: str) -> str:
    """Return the path of :func:`best_checkpoint`; raise UsageError if the run has none."""
    checkpoint = best_checkpoint(store)
    if checkpoint is None:
        if read_config(store).is_range_test:
            raise UsageError(
                f"Run {run!r} has looked for a learning rate, and such a run keeps no checkpoint; name another one."
            )
        raise UsageError(
            f"Run {run!r} has no checkpoint: a run that trains writes one after its first epoch, and when it is "
            "stopped; if it is over, none was written, or they were deleted, and --resume trains it from the beginning."
        )
    return checkpoint


def stored_thresholds(store: Store, checkpoint: str, num_classes: int) -> list[float] | None:
    """Return the threshold of each class that the last evaluation before a checkpoint chose; None if it chose none.

    None also if they are damaged, or not as many as ``num_classes``.
    """
    stored: object = read_json(store, f"{checkpoint}.json").get("thresholds")
    thresholds = cast(list[float], stored) if matches(stored, list[float]) else []
    return thresholds if len(thresholds) == num_classes else None
