"""The state and the result of each trial of a sweep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from raytrain.experiments.search_space import Point
from raytrain.experiments.trials import Trial
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import CONFIG, SUMMARY, read_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import StopReason, stop_reason_of
from raytrain.runs.status import read_status

WAITING = "waiting"
"""The status of a trial that has not begun."""
_FINAL_STOPS = ("early_stopping", "target", "patience", "time")
"""Kinds of :class:`StopReason` after which a trial has its result: a resume of the sweep must not train it further."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The state of a trial, or its result. Values that are not known are None.

    ``evaluations`` are pairs of an epoch and the value of ``metric`` after it; ``value`` is the best of these, and
    ``accuracy`` the highest accuracy of any evaluation. ``seconds`` is the time since the trial was last started or
    resumed; while it trains, it is that of all of its attempts. ``reason`` says why it stopped or is about to stop, or
    is the error with which it failed.
    """

    name: str
    values: Point
    run_dir: str
    status: str = WAITING
    metric: str = "accuracy"
    """The metric of ``--best``, which the trials are compared by."""
    is_lower_better: bool = False
    value: float | None = None
    accuracy: float | None = None
    steps: int = 0
    epoch: int | None = None
    num_epochs: int | None = None
    loss: float | None = None
    images_per_s: float | None = None
    seconds: float = 0.0
    dollars: float | None = None
    """What the trial's machines have cost so far, as if no other trial used them; None without --price."""
    reason: str | StopReason | None = None
    evaluations: tuple[tuple[int, float], ...] = ()

    @property
    def score(self) -> float | None:
        """A number from ``value`` that is larger for a better trial; None without a value."""
        return None if self.value is None else -self.value if self.is_lower_better else self.value

    def now(self, snapshot: Snapshot, evaluations: Iterable[MetricRow]) -> TrialResult:
        """Return the trial's state according to a ``snapshot`` of its run and the rows of all its ``evaluations``."""
        latest, request, result = snapshot.latest, snapshot.stop_request, snapshot.result
        return dataclasses.replace(
            self.measured(evaluations),
            status=snapshot.status,
            steps=result.steps if result else snapshot.step,
            epoch=snapshot.epoch,
            num_epochs=snapshot.num_epochs,
            loss=latest and latest.loss,
            images_per_s=latest and latest.images_per_s,
            seconds=result.seconds if result else snapshot.elapsed_s,
            dollars=snapshot.dollars,
            reason=(result.error or result.stop_reason) if result else request,
        )

    def measured(self, rows: Iterable[MetricRow]) -> TrialResult:
        """Return the trial's state with the metrics in the ``rows`` of evaluations; only finite values count.

        An evaluation before the first step does not count: it measures a network that the trial has not trained.
        """
        rows = [row for row in rows if row.step > 0]
        values = ((row.epoch, row.metrics.get(self.metric)) for row in rows)
        evaluations = tuple((epoch, value) for epoch, value in values if value is not None and math.isfinite(value))
        best = min if self.is_lower_better else max
        return dataclasses.replace(
            self,
            value=best((value for _, value in evaluations), default=None),
            accuracy=max((row.accuracy for row in rows if row.accuracy is not None), default=None),
            evaluations=evaluations,
        )


def is_stopped_early(trial: TrialResult) -> bool:
    """Return True if the trial has stopped because it was worse than others."""
    is_early = isinstance(trial.reason, StopReason) and trial.reason.kind == "early_stopping"
    return trial.status == "stopped" and is_early


def is_over(trial: TrialResult) -> bool:
    """Return True if the trial has nothing left to do: it finished, or early stopping or an option ended it.

    A trial that a person stopped, or that failed, is not over: a resume of the sweep trains it further.
    """
    if trial.status == "finished":
        return True
    return trial.status == "stopped" and isinstance(trial.reason, StopReason) and trial.reason.kind in _FINAL_STOPS


def best_first(trials: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """Return the trials from best to worst; those that were not evaluated come last."""
    return tuple(sorted(trials, key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.name)))


def stored_result(trial: Trial) -> TrialResult:
    """Return the state of a trial according to its documents.

    A trial without documents is waiting, and one without a summary was interrupted.
    """
    store = trial.store
    waiting = TrialResult(
        name=trial.name,
        values=trial.values,
        run_dir=store.url,
        metric=trial.metric.name,
        is_lower_better=trial.metric.is_lower_better,
    )
    if not store.exists(CONFIG):
        return waiting

    # A trial whose process was killed has a history, but no summary, so the document read here is empty.
    summary = read_json(store, SUMMARY)
    rows = [row for row in read_metrics(store) if row.kind == "evaluation"]
    return dataclasses.replace(
        waiting.measured(rows),
        status=summary.get("status", "interrupted"),
        steps=summary.get("steps", 0),
        seconds=summary.get("seconds", 0.0),
        dollars=read_status(store).dollars,
        reason=summary.get("error") or stop_reason_of(summary),
    )
