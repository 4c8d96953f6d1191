"""The trials of a sweep: their names, values and options, kept in the sweep's folder. Knows neither Ray nor torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.errors import UsageError, option_name
from raytrain.experiments.sweep.search_space import Point, parse, points
from raytrain.runs import records
from raytrain.runs.layout import CONFIG, SUMMARY, SWEEP

if TYPE_CHECKING:
    from raytrain.storage.base import Store

EARLY = "early stopping"
"""Begins the stop reason of a trial that was worse than the others: unlike others that stopped, it is over."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep tries; kept in its folder, so that it can be gone on with."""

    vary: tuple[str, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, its values of the varied options, and all of its options."""

    name: str
    values: Point
    config: TrainConfig


def plan_sweep(config: TrainConfig, vary: Sequence[str], trials: int | None) -> Sweep:
    """What is tried: as ``vary`` and ``trials`` say, or with ``--resume`` what the sweep was begun with."""
    if config.resume:
        return _begun(config, vary, trials)
    if not vary:
        raise UsageError("--vary is missing; say what differs between the trials, such as --vary learning-rate=0.01,0.1,1.")
    return Sweep(vary=tuple(vary), points=tuple(points(parse(vary), trials, config.seed)))


def trials_of(sweep: Sweep, config: TrainConfig, name: str) -> list[Trial]:
    """The trials of the sweep called ``name``; raises UsageError for options that no run may have, or that two trials share."""
    _check_shared(config)
    width = max(2, len(str(len(sweep.points) - 1)))
    trials = [_trial(f"{name}-{number:0{width}d}", point, config) for number, point in enumerate(sweep.points)]
    seen: dict[TrainConfig, Trial] = {}
    for trial in trials:
        twin = seen.setdefault(dataclasses.replace(trial.config, name=None), trial)
        if twin is not trial:
            both = " and ".join(as_typed(each.values) for each in (twin, trial))
            raise UsageError(f"--vary: {both} come to the same options; leave one out, or vary the option that stands above it.")
    return trials


def as_typed(values: Mapping[str, Any]) -> str:
    """Varied values as one would type them."""
    return " ".join(f"{option_name(name)}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """A varied value as one would type it."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def write_sweep(store: Store, sweep: Sweep) -> None:
    """Keep what is tried."""
    records.write_json(store, SWEEP, dataclasses.asdict(sweep))


def check_names_free(trials: Iterable[Trial]) -> None:
    """Raise UsageError where a run is called as a trial of a new sweep would be."""
    for trial in trials:
        if records.run_store(trial.config.storage, trial.name).exists(CONFIG):
            raise UsageError(f"A run called {trial.name!r} is in {trial.config.storage} already; choose another --name for the sweep.")


def is_over(store: Store) -> bool:
    """Whether the trial in ``store`` has nothing left to do: it was finished, or stopped for being worse than the others."""
    summary = records.read_json(store, SUMMARY)
    early = (summary.get("stop_reason") or "").startswith(EARLY)
    return summary.get("status") == "finished" or (summary.get("status") == "stopped" and early)


def _begun(config: TrainConfig, vary: Sequence[str], trials: int | None) -> Sweep:
    assert config.name is not None
    document = records.read_json(records.open_run(config.storage, config.name), SWEEP)
    if not document:
        raise UsageError(f"Run {config.name!r} is no sweep; go on with it with `raytrain train … --resume`.")
    begun = Sweep(vary=tuple(document["vary"]), points=tuple(document["points"]))
    if (vary and tuple(vary) != begun.vary) or trials not in (None, len(begun.points)):
        words = " ".join(begun.vary)
        raise UsageError(
            f"Sweep {config.name!r} was begun with --vary {words} and {len(begun.points)} trials; go on with those by leaving --vary and "
            "--trials out, or begin another under another --name."
        )
    return begun


def _check_shared(config: TrainConfig) -> None:
    if config.elastic_workers or config.worker_load:
        raise UsageError("--workers is how many trials of a sweep train at once, each on one worker; give a number, and no --worker-load.")
    if config.cache == "none":
        raise UsageError("--cache is none, and the trials of a sweep share the decoded images in memory; use --cache auto.")


def _trial(name: str, point: Point, config: TrainConfig) -> Trial:
    values: dict[str, Any] = {**point}
    options = dataclasses.replace(config, **values, name=name, workers=1, resume=False).resolved(1)
    return Trial(records.check_name(name), point, options)
