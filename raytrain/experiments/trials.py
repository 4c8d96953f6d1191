"""The trials of a sweep: their names, values and options, how each of them stands, and how it ended."""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain.config import TrainConfig
from raytrain.config.user_code import names_own_function, stored_function_error
from raytrain.config.values import matches
from raytrain.errors import UsageError, option_name
from raytrain.experiments.scaling import Scaling
from raytrain.experiments.search_space import Point, are_points, parse, points
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import (
    CONFIG,
    SUMMARY,
    SWEEP,
    check_name,
    open_run,
    read_json,
    run_store,
    write_json,
)
from raytrain.runs.history import read_metrics
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import EndStatus, StopReason, stop_reason_of
from raytrain.storage.store import Store
from raytrain.training.evaluation_metrics import is_lower_better

WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points that a sweep tries. It is stored in the sweep's folder, so that the sweep can be resumed."""

    vary: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def varies_workers(self) -> bool:
        """True if the trials have workers of their own, so that one trains after the other."""
        return any("workers" in point for point in self.points)

    @property
    def trains_alone(self) -> bool:
        """True if one trial trains after the other, and reads its own images: their workers or their folds differ."""
        return self.varies_workers or any("validation_fold" in point for point in self.points)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, its values of the varied options, and all of its options.

    ``metric`` is what the sweep compares its trials by: that of ``--best``.
    """

    name: str
    values: Point
    config: TrainConfig
    metric: str = "accuracy"
    is_lower_better: bool = False

    @property
    def store(self) -> Store:
        """The trial's place in storage."""
        return run_store(self.config.storage, self.name)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial stands or ended; ``value`` is the best of ``evaluations`` (epoch, ``metric``). Unknown is None."""

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
    reason: str | StopReason | None = None
    evaluations: tuple[tuple[int, float], ...] = ()

    @property
    def score(self) -> float | None:
        """Of ``value``, so that the larger score is the better trial."""
        return None if self.value is None else -self.value if self.is_lower_better else self.value

    def now(self, snapshot: Snapshot, evaluations: Iterable[MetricRow]) -> TrialResult:
        """Return the same trial as its run stands at this moment, by the rows of all of its evaluations."""
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
            reason=(result.error or result.stop_reason) if result else request,
        )

    def measured(self, rows: Iterable[MetricRow]) -> TrialResult:
        """Return the same trial with what the ``rows`` of evaluations have measured, of which NaN counts as nothing."""
        rows = list(rows)
        values = ((row.epoch, row.metrics.get(self.metric)) for row in rows)
        known = tuple((epoch, value) for epoch, value in values if value is not None and not math.isnan(value))
        best = min if self.is_lower_better else max
        return dataclasses.replace(
            self,
            value=best((value for _, value in known), default=None),
            accuracy=max((row.accuracy for row in rows if row.accuracy is not None), default=None),
            evaluations=known,
        )


@dataclass(frozen=True, kw_only=True)
class FoldsResult:
    """Mean and deviation of the best values of a cross-validation: of ``num_measured`` of ``num_folds`` folds."""

    values: Point
    metric: str
    num_folds: int
    num_measured: int
    mean: float | None
    deviation: float | None
    """Of the folds, with n - 1 in the denominator; None of fewer than two."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended, with its trials from best to worst; ``summary.json`` holds the same under the same names.

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
    stop_reason: StopReason | None = None
    scaling: tuple[Scaling, ...] = ()
    """What more workers gain, for each choice of the other options; empty unless --vary has workers."""
    folds: tuple[FoldsResult, ...] = ()
    """Mean and deviation over the folds, for each choice of the other options; empty without folds."""
    histories: Mapping[str, Sequence[MetricRow]] = field(default_factory=dict[str, Sequence[MetricRow]], repr=False)
    """The metrics of the finished trials, by name, if --vary has workers; the summary is without them."""

    def summary(self) -> dict[str, Any]:
        """Return the result as a dictionary of plain values."""
        document = dataclasses.asdict(dataclasses.replace(self, histories={}))
        del document["histories"]
        return document


def plan_sweep(config: TrainConfig, vary: Sequence[str], trials: int | None, *, trust: bool = False) -> Sweep:
    """Return the points of ``vary`` and ``trials``, or the stored ones of a sweep that is resumed.

    Raises UsageError if a stored one names code, unless ``trust`` or the options name it too.

    Example: ``plan_sweep(config, ["learning-rate=0.01,0.1"], trials=None).points``
    """
    if not config.resume:
        if not vary:
            raise UsageError(
                "--vary is missing; say what differs between the trials, such as --vary learning-rate=0.01,0.1,1."
            )
        return Sweep(vary=tuple(vary), points=tuple(points(parse(vary), trials, config.seed)))

    # A sweep that is resumed keeps its points, so --vary and --trials may only repeat them.
    store = open_run(config.storage, config.name or "")
    if not store.exists(SWEEP):
        raise UsageError(f"Run {config.name!r} is not a sweep; resume it with `raytrain train … --resume`.")
    stored = read_sweep(store)
    if (vary and tuple(vary) != stored.vary) or trials not in (None, len(stored.points)):
        words = " ".join(stored.vary)
        raise UsageError(
            f"Sweep {config.name!r} was started with --vary {words} and {len(stored.points)} trials; leave --vary and "
            "--trials out to resume it, or start another sweep with another --name."
        )

    # A stored point may name an own function, which runs only if this command names it too.
    models = () if trust else parse(vary).get("model")
    named = {config.model, *(models if isinstance(models, tuple) else ())}
    for point in stored.points:
        model = str(point.get("model", config.model))
        if not trust and names_own_function(model) and model not in named:
            document = f"{config.storage}/{config.name}/{SWEEP}"
            raise stored_function_error("model", model, document, may_be_named=True)
    return stored


def trials_of(sweep: Sweep, config: TrainConfig, name: str) -> list[Trial]:
    """Return the trials of the sweep called ``name``.

    Raises UsageError if options are not allowed, or two trials have the same ones.
    """
    if sweep.varies_workers and (config.workers != "auto" or config.worker_load):
        raise UsageError(
            "--vary says how many workers each trial has, and one trains after the other; omit --workers and "
            "--worker-load."
        )
    if config.elastic_workers or config.worker_load:
        raise UsageError(
            "--workers is how many trials of a sweep train at once, each on one worker; give a number, and no "
            "--worker-load."
        )
    metric, is_lower = config.best_metric, is_lower_better(config.best_metric, config)
    trials: list[Trial] = []
    seen: dict[TrainConfig, Trial] = {}
    for trial_name, point in zip(trial_names(sweep, name), sweep.points, strict=True):
        alone = int(config.workers) if sweep.trains_alone and config.workers != "auto" else 1
        values: dict[str, Any] = {"workers": alone, **point}
        options = dataclasses.replace(config, **values, name=trial_name, resume=False)
        scaled = options.scaled_to(int(options.workers))
        trial = Trial(check_name(trial_name), point, scaled, metric, is_lower)
        trials.append(trial)

        # Two points may be the same trial, if an option has no effect beside another. With workers that vary, 64 and
        # 32/worker are the same on two of them only, where both lines of the figures need a point.
        twin = seen.setdefault(dataclasses.replace(options if sweep.varies_workers else scaled, name=None), trial)
        if twin is not trial:
            both = " and ".join(as_typed(twice.values) for twice in (twin, trial))
            raise UsageError(
                f"--vary: {both} result in the same options; leave one out, or vary the option that overrides it."
            )
    return trials


def mean_of_folds(trials: Iterable[TrialResult]) -> tuple[FoldsResult, ...]:
    """Return mean and deviation over the folds of each choice of the other options, the best mean first."""
    choices: dict[str, list[TrialResult]] = {}
    for trial in trials:
        others = {name: value for name, value in trial.values.items() if name != "validation_fold"}
        choices.setdefault(as_typed(others), []).append(trial)
    results: list[FoldsResult] = []
    for of_choice in choices.values():
        values = [trial.value for trial in of_choice if trial.value is not None]
        results.append(
            FoldsResult(
                values={name: value for name, value in of_choice[0].values.items() if name != "validation_fold"},
                metric=of_choice[0].metric,
                num_folds=len(of_choice),
                num_measured=len(values),
                mean=statistics.mean(values) if values else None,
                deviation=statistics.stdev(values) if len(values) > 1 else None,
            )
        )
    sign = 1 if any(trial.is_lower_better for choice in choices.values() for trial in choice) else -1
    return tuple(sorted(results, key=lambda result: (result.mean is None, sign * (result.mean or 0.0))))


def trial_names(sweep: Sweep, name: str) -> list[str]:
    """Return the names of the trials of the sweep called ``name``, in the order of its points: NAME-00, NAME-01, …"""
    width = max(2, len(str(len(sweep.points) - 1)))
    return [f"{name}-{number:0{width}d}" for number in range(len(sweep.points))]


def names_of(storage: str, name: str) -> list[str]:
    """Return the runs of a sweep, some of which may not have started; otherwise the run itself.

    Raises UsageError if there is none.
    """
    store = run_store(storage, name)
    if store.exists(SWEEP):
        return trial_names(read_sweep(store), name)
    open_run(storage, name)
    return [name]


def as_typed(values: Mapping[str, Any]) -> str:
    """Return varied values as a user types them: ``learning-rate=0.1 nesterov=true``."""
    return " ".join(f"{option_name(name)}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """Return one varied value as a user types it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_sweep(store: Store, sweep: Sweep) -> None:
    """Write the points that the sweep tries into its folder."""
    write_json(store, SWEEP, dataclasses.asdict(sweep))


def check_names_free(trials: Iterable[Trial]) -> None:
    """Raise UsageError if a run has the name that a trial of a new sweep would get."""
    for trial in trials:
        if trial.store.exists(CONFIG):
            raise UsageError(
                f"A run called {trial.name!r} is in {trial.config.storage} already; choose another --name for the "
                "sweep."
            )


def is_over(trial: TrialResult) -> bool:
    """Return True if the trial has nothing left to do: it was finished, or stopped early."""
    stopped_early = isinstance(trial.reason, StopReason) and trial.reason.kind == "early_stopping"
    return trial.status == "finished" or (trial.status == "stopped" and stopped_early)


def best_first(trials: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """Return the trials from best to worst; those that were not evaluated come last."""
    return tuple(sorted(trials, key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.name)))


def stored_result(trial: Trial) -> TrialResult:
    """Return how a trial ended, by the documents that it has written; one without documents waits."""
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

    # A trial whose process was killed has a history, and no summary.
    summary = read_json(store, SUMMARY)
    rows = [row for row in read_metrics(store) if row.kind == "evaluation"]
    return dataclasses.replace(
        waiting.measured(rows),
        status=summary.get("status", "interrupted"),
        steps=summary.get("steps", 0),
        seconds=summary.get("seconds", 0.0),
        reason=summary.get("error") or stop_reason_of(summary),
    )


def read_sweep(store: Store) -> Sweep:
    """Return the document in the sweep's folder; UsageError if it is damaged, or a point sets what may not vary."""
    document = read_json(store, SWEEP)
    if not matches(document.get("vary"), list[str]) or not are_points(document.get("points")):
        raise UsageError(f"{store.url}/{SWEEP} is damaged, or no sweep's; start another sweep with another --name.")
    return Sweep(vary=tuple(document["vary"]), points=tuple(document["points"]))


_FIRST_RUNG_FRACTION = 1 / 8  # of the epochs; each further rung is at twice as many


class EarlyStopping:
    """After 1/8, 1/4 and 1/2 of ``num_epochs``, a trial continues if it is in the upper half of those before it."""

    def __init__(self, num_epochs: int) -> None:
        self._lock = threading.Lock()
        self._rungs: list[tuple[int, dict[str, float]]] = []  # epoch, and the scores there by trial; highest first
        epoch = max(1, int(num_epochs * _FIRST_RUNG_FRACTION))
        while epoch < num_epochs:
            self._rungs.insert(0, (epoch, {}))
            epoch *= 2

    def is_worse(self, trial: str, epoch: int, score: float) -> bool:
        """Note a ``trial``'s score after ``epoch``, the larger the better; True if below the median of earlier ones."""
        with self._lock:
            rung = next((measured for first, measured in self._rungs if first <= epoch), None)
            if rung is None or trial in rung:
                return False
            before = list(rung.values())
            rung[trial] = score
            return bool(before) and score < statistics.median(before)
