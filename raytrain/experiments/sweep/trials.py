"""The trials of a sweep: their names, values and options, and the document that the sweep's folder keeps of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.config.user_function import names_own_function, stored_function_error
from raytrain.errors import UsageError, option_name
from raytrain.experiments.sweep.search_space import Choices, Point, Space, are_points, parse, points
from raytrain.runs.documents import check_name, open_run, read_json, run_store, write_json
from raytrain.runs.layout import CONFIG, SUMMARY, SWEEP
from raytrain.runs.outcome import stop_reason_of
from raytrain.runs.stored_values import matches

if TYPE_CHECKING:
    from raytrain.storage.base import Store


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
    if config.cache == "none":
        raise UsageError(
            "--cache is none, and the trials of a sweep share the decoded images in memory; use --cache auto."
        )


def _trial(name: str, point: Point, config: TrainConfig) -> Trial:
    values: dict[str, Any] = {**point}
    options = dataclasses.replace(config, **values, name=name, workers=1, resume=False).scaled_to(1)
    return Trial(check_name(name), point, options)
