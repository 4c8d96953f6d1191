"""The results of a sweep, read from the documents that its trials wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.experiments.sweep.trials import Trial
from raytrain.runs.documents import read_json
from raytrain.runs.history import read_metrics
from raytrain.runs.layout import CONFIG, SUMMARY
from raytrain.runs.outcome import EndStatus, StopReason, stop_reason_of
from raytrain.runs.trial_status import WAITING, TrialStatus


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial ended; ``reason`` is why it failed or stopped. ``accuracy`` is the best of its ``evaluations``."""

    name: str
    values: dict[str, Any]
    status: str
    accuracy: float | None
    steps: int
    seconds: float
    reason: str | StopReason | None
    run_dir: str
    evaluations: tuple[tuple[int, float], ...]
    """Epoch and accuracy on the test images."""

    def trial_status(self) -> TrialStatus:
        """The result as a view shows it among trials that still train."""
        return TrialStatus(status=self.status, step=self.steps, accuracy=self.accuracy, reason=self.reason)


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended, with its trials from best to worst; ``summary.json`` holds the same under the same names."""

    name: str
    status: EndStatus
    best: str | None
    trials: tuple[TrialResult, ...]
    run_dir: str
    seconds: float
    stop_reason: StopReason | None = None

    def summary(self) -> dict[str, Any]:
        """The result as a dictionary of plain values."""
        return dataclasses.asdict(self)


def collect(trials: Sequence[Trial]) -> tuple[TrialResult, ...]:
    """The results of ``trials``, from best to worst; those without an accuracy come last."""
    results = [collect_one(trial) for trial in trials]
    return tuple(sorted(results, key=lambda result: (result.accuracy is None, -(result.accuracy or 0.0), result.name)))


def collect_one(trial: Trial) -> TrialResult:
    """The result of a trial, as its folder has it."""
    store = trial.store
    summary = read_json(store, SUMMARY)
    evaluations = [(row.epoch, row.accuracy) for row in read_metrics(store) if row.kind == "evaluation"]
    known = tuple((epoch, accuracy) for epoch, accuracy in evaluations if accuracy is not None)
    return TrialResult(
        name=trial.name,
        values=dict(trial.values),
        status=summary.get("status", "interrupted") if store.exists(CONFIG) else WAITING,
        accuracy=max((accuracy for _, accuracy in known), default=None),
        steps=summary.get("steps", 0),
        seconds=summary.get("seconds", 0.0),
        reason=summary.get("error") or stop_reason_of(summary),
        run_dir=store.url,
        evaluations=known,
    )
