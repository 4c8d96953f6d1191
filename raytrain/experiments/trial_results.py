"""The state and the result of each trial of a sweep, and the result of the sweep."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain.experiments.scaling import Scaling
from raytrain.experiments.search_space import Point
from raytrain.experiments.trials import Trial, as_typed
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import CONFIG, SUMMARY, read_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import EndStatus, StopReason, stop_reason_of
from raytrain.runs.redact import one_line, redact
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


@dataclass(frozen=True, kw_only=True)
class SweepSnapshot:
    """State of a sweep at one moment, as its view gets it.

    ``dollars`` is what the machines of all trials have cost so far, over all attempts; None without --price. A machine
    on which several trials train counts once.
    """

    trials: tuple[TrialResult, ...]
    dollars: float | None = None


@dataclass(frozen=True, kw_only=True)
class FoldsResult:
    """Mean and standard deviation over the folds of a cross-validation of the best value on each.

    ``values`` are those of the other options that the sweep varies. ``num_measured`` of the ``num_folds`` folds have a
    value of ``metric``; ``mean`` is None if none has.
    """

    values: Point
    metric: str
    num_folds: int
    num_measured: int
    mean: float | None
    deviation: float | None
    """The standard deviation over the folds, with n - 1 in the denominator; None for fewer than two values."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended, with its trials from best to worst; ``summary.json`` has the same fields.

    Example::

        result = raytrain.sweep(config, vary="learning-rate=0.01,0.1")
        for trial in result.trials:
            print(trial.name, trial.values, trial.metric, trial.value)
    """

    name: str
    status: EndStatus
    best: str | None
    trials: tuple[TrialResult, ...]
    run_dir: str
    seconds: float
    dollars: float | None = None
    """What the machines of all trials have cost by --price, over all attempts."""
    stop_reason: StopReason | None = None
    scaling: tuple[Scaling, ...] = ()
    """What more workers gain, for each combination of the other options; empty unless --vary has workers."""
    folds: tuple[FoldsResult, ...] = ()
    """Mean and deviation over the folds, for each combination of the other options; empty without folds."""
    histories: Mapping[str, Sequence[MetricRow]] = field(default_factory=dict[str, Sequence[MetricRow]], repr=False)
    """The metrics of the finished trials, by name, if --vary has workers; they are not in the summary."""

    def summary(self) -> dict[str, Any]:
        """Return the result as a dictionary of plain values, without the histories."""
        # The histories are replaced first, because asdict would copy them.
        document = dataclasses.asdict(dataclasses.replace(self, histories={}))
        del document["histories"]
        return document


def mean_of_folds(trials: Iterable[TrialResult]) -> tuple[FoldsResult, ...]:
    """Return mean and deviation over the folds, for each combination of the other options, the best mean first.

    Combinations without a value come last.
    """
    # Trials belong together if they differ in their fold alone.
    trials_of_choice: dict[str, list[TrialResult]] = {}
    for trial in trials:
        choice = {name: value for name, value in trial.values.items() if name != "validation_fold"}
        trials_of_choice.setdefault(as_typed(choice), []).append(trial)
    results: list[FoldsResult] = []
    for folds in trials_of_choice.values():
        values = [trial.value for trial in folds if trial.value is not None]
        results.append(
            FoldsResult(
                values={name: value for name, value in folds[0].values.items() if name != "validation_fold"},
                metric=folds[0].metric,
                num_folds=len(folds),
                num_measured=len(values),
                mean=statistics.mean(values) if values else None,
                deviation=statistics.stdev(values) if len(values) > 1 else None,
            )
        )
    # All trials of a sweep are compared by one metric.
    sign = 1 if any(trial.is_lower_better for folds in trials_of_choice.values() for trial in folds) else -1
    return tuple(sorted(results, key=lambda result: (result.mean is None, sign * (result.mean or 0.0))))


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


def message_of_sweep(result: SweepResult, failure: str | None = None) -> dict[str, Any]:
    """Return the message about a sweep's end, as ``text`` and as single values, from which secrets are removed.

    ``failure`` says why the sweep failed as a whole. Values that are not known are left out.

    Example: ``message_of_sweep(result)["text"] == "Sweep rates finished: rates-03 is the best of 8, …"``
    """
    # The sentence: how the sweep ended, its best trial, its cost, and why it failed.
    text = f"Sweep {result.name} {result.status}"
    best = next((trial for trial in result.trials if trial.name == result.best), None)
    if best is not None and best.value is not None:
        value = f"{best.metric.replace('_', ' ')} {best.value:.4f}"
        text += f": {best.name} is the best of {len(result.trials)}, {value} with {as_typed(best.values)}"
    text += "" if result.dollars is None else f", ${result.dollars:,.2f}"
    text += f". {failure}" if failure else ""

    # The same facts as single values, without those that are not known.
    facts = {
        "text": text,
        "name": result.name,
        "status": result.status,
        "best": result.best,
        "metric": best and best.metric,
        "value": best and best.value,
        "trials": len(result.trials),
        "seconds": result.seconds,
        "dollars": result.dollars,
        "run_dir": result.run_dir,
        "error": failure,
    }
    return {
        name: one_line(redact(value)) if isinstance(value, str) else value
        for name, value in facts.items()
        if value is not None
    }


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
        metric=trial.metric,
        is_lower_better=trial.is_lower_better,
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
