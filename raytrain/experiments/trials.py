"""The trials of a sweep: their names, values and options, how each of them stands, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.config.user_function import names_own_function, stored_function_error
from raytrain.errors import UsageError, option_name
from raytrain.experiments.search_space import Choices, Point, Space, are_points, parse, points
from raytrain.runs.documents import check_name, open_run, read_json, run_store, write_json
from raytrain.runs.history import read_metrics
from raytrain.runs.layout import CONFIG, SUMMARY, SWEEP
from raytrain.runs.outcome import EndStatus, StopReason, stop_reason_of
from raytrain.runs.snapshot import Snapshot
from raytrain.runs.stored_values import matches

if TYPE_CHECKING:
    from raytrain.storage.base import Store

WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points that a sweep tries. It is stored in the sweep's folder, so that the sweep can be resumed."""

    vary: tuple[str, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, its values of the varied options, and all of its options."""

    name: str
    values: Point
    config: TrainConfig

    @property
    def store(self) -> Store:
        """The trial's place in storage."""
        return run_store(self.config.storage, self.name)


@dataclass(frozen=True, kw_only=True)
class TrialStatus:
    """How a trial stands. What is not known yet is None; ``accuracy`` is the best on the test images so far."""

    name: str
    values: Point
    status: str = WAITING
    step: int = 0
    epoch: int = 0
    num_epochs: int = 0
    loss: float | None = None
    accuracy: float | None = None
    num_evaluations: int = 0
    images_per_s: float | None = None
    reason: str | StopReason | None = None

    @classmethod
    def of(cls, trial: Trial, snapshot: Snapshot, accuracies: Sequence[float]) -> TrialStatus:
        """The status of a trial that trains or has trained; ``accuracies`` are those of its evaluations so far."""
        latest, request, result = snapshot.latest, snapshot.stop_request, snapshot.result
        return cls(
            name=trial.name,
            values=trial.values,
            status=snapshot.status,
            step=snapshot.step,
            epoch=snapshot.epoch,
            num_epochs=snapshot.num_epochs,
            loss=latest and latest.loss,
            accuracy=max(accuracies, default=None),
            num_evaluations=len(accuracies),
            images_per_s=latest and latest.images_per_s,
            reason=(result.error or result.stop_reason) if result else request,
        )


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial ended; ``reason`` is why it failed or stopped. ``accuracy`` is the best of its ``evaluations``."""

    name: str
    values: Point
    status: str
    accuracy: float | None
    steps: int
    seconds: float
    reason: str | StopReason | None
    run_dir: str
    evaluations: tuple[tuple[int, float], ...]
    """Epoch and accuracy on the test images."""

    @property
    def last_status(self) -> TrialStatus:
        """The result as a view shows it among trials that still train."""
        return TrialStatus(
            name=self.name,
            values=self.values,
            status=self.status,
            step=self.steps,
            accuracy=self.accuracy,
            reason=self.reason,
        )


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


def plan_sweep(config: TrainConfig, vary: Sequence[str], trials: int | None, *, trust: bool = False) -> Sweep:
    """The points that ``vary`` and ``trials`` describe, or with ``--resume`` those that the sweep started with.

    Raises UsageError if a stored point names a network that is a function of the sweep's author, unless the user names
    it too, or says ``trust``.
    """
    if config.resume:
        stored = _stored_sweep(config, vary, trials)
        if not trust:
            _check_networks(stored, config, parse(vary))
        return stored
    if not vary:
        raise UsageError(
            "--vary is missing; say what differs between the trials, such as --vary learning-rate=0.01,0.1,1."
        )
    return Sweep(vary=tuple(vary), points=tuple(points(parse(vary), trials, config.seed)))


def trials_of(sweep: Sweep, config: TrainConfig, name: str) -> list[Trial]:
    """The trials of the sweep called ``name``.

    Raises UsageError if a trial's options are not allowed, or if two trials have the same options.
    """
    _check_shared_options(config)
    trials = [_trial(*each, config) for each in zip(trial_names(sweep, name), sweep.points, strict=True)]
    seen: dict[TrainConfig, Trial] = {}
    for trial in trials:
        twin = seen.setdefault(dataclasses.replace(trial.config, name=None), trial)
        if twin is not trial:
            both = " and ".join(as_typed(each.values) for each in (twin, trial))
            raise UsageError(
                f"--vary: {both} result in the same options; leave one out, or vary the option that overrides it."
            )
    return trials


def trial_names(sweep: Sweep, name: str) -> list[str]:
    """The names of the trials of the sweep called ``name``, in the order of its points."""
    width = max(2, len(str(len(sweep.points) - 1)))
    return [f"{name}-{number:0{width}d}" for number in range(len(sweep.points))]


def as_typed(values: Mapping[str, Any]) -> str:
    """Varied values as a user types them."""
    return " ".join(f"{option_name(name)}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """One varied value as a user types it."""
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


def is_over(store: Store) -> bool:
    """Whether the trial in ``store`` has nothing left to do: it was finished, or stopped early."""
    summary = read_json(store, SUMMARY)
    reason = stop_reason_of(summary)
    stopped_early = reason is not None and reason.kind == "early_stopping"
    return summary.get("status") == "finished" or (summary.get("status") == "stopped" and stopped_early)


def collect(trials: Sequence[Trial], errors: Mapping[str, str]) -> tuple[TrialResult, ...]:
    """The results of ``trials``, from best to worst; those without an accuracy come last.

    ``errors`` are why trials failed, by name: one that failed before it began has no documents.
    """
    results = [trial_result(trial) for trial in trials]
    failed = {name: {"status": "failed", "reason": reason} for name, reason in errors.items()}
    results = [dataclasses.replace(result, **failed.get(result.name, {})) for result in results]
    return tuple(sorted(results, key=lambda result: (result.accuracy is None, -(result.accuracy or 0.0), result.name)))


def trial_result(trial: Trial) -> TrialResult:
    """The result of a trial, as the documents tell it that the trial has written."""
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


def _stored_sweep(config: TrainConfig, vary: Sequence[str], trials: int | None) -> Sweep:
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
    return stored


def read_sweep(store: Store) -> Sweep:
    """The document in the sweep's folder; raises UsageError if it is damaged, or if a point sets what may not vary."""
    document = read_json(store, SWEEP)
    if not matches(document.get("vary"), list[str]) or not are_points(document.get("points")):
        raise UsageError(f"{store.url}/{SWEEP} is damaged, or no sweep's; start another sweep with another --name.")
    return Sweep(vary=tuple(document["vary"]), points=tuple(document["points"]))


def _check_networks(stored: Sweep, config: TrainConfig, typed: Space) -> None:
    """Raise UsageError if a stored point names an own function that neither ``config`` nor ``typed`` does."""
    models = typed.get("model")
    named = {config.model, *(models.values if isinstance(models, Choices) else ())}
    for point in stored.points:
        model = str(point.get("model", config.model))
        if names_own_function(model) and model not in named:
            document = f"{config.storage}/{config.name}/{SWEEP}"
            raise stored_function_error("model", model, document, may_be_named=True)


def _check_shared_options(config: TrainConfig) -> None:
    if config.elastic_workers or config.worker_load:
        raise UsageError(
            "--workers is how many trials of a sweep train at once, each on one worker; give a number, and no "
            "--worker-load."
        )


def _trial(name: str, point: Point, config: TrainConfig) -> Trial:
    values: dict[str, Any] = {**point}
    options = dataclasses.replace(config, **values, name=name, workers=1, resume=False).scaled_to(1)
    return Trial(check_name(name), point, options)
