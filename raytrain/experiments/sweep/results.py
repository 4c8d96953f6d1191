"""What came of a sweep, read from what its trials left in storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.experiments.sweep.trials import Trial
from raytrain.runs import records
from raytrain.runs.history import METRICS, read_lines
from raytrain.runs.layout import CONFIG, SUMMARY
from raytrain.runs.trial_status import WAITING


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial ended; ``reason`` is why it failed or stopped. ``accuracy`` is the best of its ``evaluations``."""

    name: str
    values: dict[str, Any]
    status: str
    accuracy: float | None
    steps: int
    seconds: float
    reason: str | None
    run_dir: str
    evaluations: tuple[tuple[int, float], ...]
    """Epoch and accuracy on the test images."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended, its trials from the best to the worst; the same names as in its summary.json."""

    name: str
    status: str
    best: str | None
    trials: tuple[TrialResult, ...]
    run_dir: str
    seconds: float
    stop_reason: str | None = None

    def summary(self) -> dict[str, Any]:
        """The result as a dictionary of plain values."""
        return dataclasses.asdict(self)


def collect(trials: Sequence[Trial]) -> tuple[TrialResult, ...]:
    """How each of ``trials`` stands in storage, from the best to the worst; those without an accuracy come last."""
    results = [collect_one(trial) for trial in trials]
    return tuple(sorted(results, key=lambda result: (result.accuracy is None, -(result.accuracy or 0.0), result.name)))


def collect_one(trial: Trial) -> TrialResult:
    """How a trial stands in storage."""
    store = records.run_store(trial.config.storage, trial.name)
    summary = records.read_json(store, SUMMARY)
    rows = [row for row in read_lines(store, METRICS) if row["kind"] == "evaluation" and row.get("accuracy") is not None]
    return TrialResult(
        name=trial.name,
        values=dict(trial.values),
        status=summary.get("status", "interrupted") if store.exists(CONFIG) else WAITING,
        accuracy=max((row["accuracy"] for row in rows), default=None),
        steps=summary.get("steps", 0),
        seconds=summary.get("seconds", 0.0),
        reason=summary.get("error") or summary.get("stop_reason"),
        run_dir=store.url,
        evaluations=tuple((row["epoch"], row["accuracy"]) for row in rows),
    )
