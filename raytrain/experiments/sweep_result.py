"""The result of a sweep, its mean over folds, and its state while it runs."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain.errors import format_dollars
from raytrain.experiments.scaling import Scaling
from raytrain.experiments.search_space import Point
from raytrain.experiments.trial_results import TrialResult
from raytrain.experiments.trials import as_typed
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import EndStatus, StopReason
from raytrain.runs.redact import one_line, redact


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
    """Result of a sweep, with its trials from best to worst; ``summary.json`` has the same fields.

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
    trials = list(trials)
    points: dict[str, Point] = {}  # without the fold, by their texts
    folds_of_point: defaultdict[str, list[TrialResult]] = defaultdict(list)
    for trial in trials:
        point = {name: value for name, value in trial.values.items() if name != "validation_fold"}
        points[as_typed(point)] = point
        folds_of_point[as_typed(point)].append(trial)

    results: list[FoldsResult] = []
    for text, folds in folds_of_point.items():
        values = [trial.value for trial in folds if trial.value is not None]
        results.append(
            FoldsResult(
                values=points[text],
                metric=folds[0].metric,
                num_folds=len(folds),
                num_measured=len(values),
                mean=statistics.mean(values) if values else None,
                deviation=statistics.stdev(values) if len(values) > 1 else None,
            )
        )

    # All trials of a sweep are compared by one metric.
    sign = 1 if any(trial.is_lower_better for trial in trials) else -1
    return tuple(sorted(results, key=lambda result: (result.mean is None, sign * (result.mean or 0.0))))


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
    text += "" if result.dollars is None else f", {format_dollars(result.dollars)}"
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
