"""Runs side by side: the options in which they differ, and how far and how well each went."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.history import Row, steps_per_epoch
from raytrain.runs.records import RunRecord, read_run

_NO_DIFFERENCE = {"name", "storage", "resume", "address"}  # where a run is, not what it does


def compare(runs: Sequence[str], *, storage: str = "./runs") -> list[dict[str, Any]]:
    """A dictionary for each run, in the order given.

    Returns:
        name, options (those in which the runs differ), status, steps, epochs, test_accuracy and test_loss (of the last
        evaluation), loss (of the last training steps), images_per_s (median), seconds (of training) and skipped (images). What
        a run has not told yet is None.

    Raises:
        UsageError: there are fewer than two runs, or one of them is unknown.
    """
    return comparison(read_runs(runs, storage))


def read_runs(runs: Sequence[str], storage: str) -> list[RunRecord]:
    """All documents of two runs or more; raises UsageError."""
    if len(runs) < 2:
        raise UsageError("raytrain compare takes two runs or more; `raytrain runs` lists them.")
    return [read_run(storage, name) for name in runs]


def comparison(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """See :func:`compare`."""
    options = differing([record.config for record in records])
    return [
        {
            "name": record.name,
            "options": {name: getattr(record.config, name) for name in options},
            "status": record.status.status,
            **_figures(record.metrics),
            "skipped": len(record.skipped),
        }
        for record in records
    ]


def differing(configs: Sequence[TrainConfig]) -> list[str]:
    """The options in which ``configs`` differ, but for those that say where a run is."""
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in _NO_DIFFERENCE]
    return [name for name in names if len({getattr(config, name) for config in configs}) > 1]


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    """From the history alone, for a run without Ray leaves no other document."""
    training = [row for row in rows if row["kind"] == "step"]
    tests = [row for row in rows if row["kind"] == "evaluation"]
    paces = [row["images_per_s"] for row in training if row.get("images_per_s") is not None]
    steps = _last(rows, "step") or 0
    return {
        "steps": steps,
        "epochs": round(steps / steps_per_epoch(rows), 2),
        "test_accuracy": _last(tests, "accuracy"),
        "test_loss": _last(tests, "loss"),
        "loss": _last(training, "loss"),
        "images_per_s": statistics.median(paces) if paces else None,
        "seconds": _last(rows, "elapsed_s"),
    }


def _last(rows: Sequence[Row], quantity: str) -> Any:
    return rows[-1].get(quantity) if rows else None
