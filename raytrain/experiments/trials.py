"""The trials of a sweep: their names and options, by the points of its plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytrain.config import TrainConfig
from raytrain.errors import UsageError, option_name
from raytrain.experiments.best_metric import BestMetric
from raytrain.experiments.search_space import Point, outermost_points, parse
from raytrain.experiments.sweep_plan import Sweep, parse_sweep, read_sweep
from raytrain.runs.documents import CONFIG, SWEEP, check_name, open_run, read_json, run_store
from raytrain.storage.store import Store
from raytrain.training.metrics.evaluation_metrics import is_lower_better


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, its ``values`` of the varied options, and all of its options, ``config``.

    ``metric`` is the metric of ``--best``, by which the sweep compares trials.
    """

    name: str
    values: Point
    config: TrainConfig
    metric: BestMetric

    @property
    def store(self) -> Store:
        """The trial's folder in storage."""
        return run_store(self.config.storage, self.name)


def examples_of(sweep: Sweep, config: TrainConfig, name: str) -> list[Trial]:
    """Return trials by which the options of all trials of a sweep can be checked.

    They are the trials themselves, or, if a sampler chooses the points later, trials at the outermost points of the
    space. Raises UsageError as :func:`trials_of` does.
    """
    if sweep.sampler is None:
        return trials_of(sweep, config, name)
    chosen_later = tuple(outermost_points(parse(sweep.vary)))
    return trials_of(dataclasses.replace(sweep, points=chosen_later, trials=None), config, name)


def trials_of(sweep: Sweep, config: TrainConfig, name: str) -> list[Trial]:
    """Return the trials of the sweep called ``name``, on the points that it has so far.

    Raises UsageError if the options of a trial are not allowed, or two trials have the same ones.
    """
    if sweep.varies_workers and (config.workers != "auto" or config.worker_load):
        raise UsageError(
            "--vary says how many workers each trial has, and one trains after the other; omit --workers and "
            "--worker-load."
        )
    if config.elastic_workers or config.worker_load:
        raise UsageError(
            "--workers is how many workers each trial of a sweep trains on; give a number, and no --worker-load."
        )
    trials: list[Trial] = []
    seen: dict[TrainConfig, Trial] = {}
    for number, point in enumerate(sweep.points):
        trial = trial_of(sweep, config, name, number, point)
        trials.append(trial)

        # Two points are the same trial if an option has no effect beside another one. If workers vary, the batch sizes
        # 64 and 32/worker are equal on two workers, but both are kept, as each has a line in the figures: they are
        # compared with the values as they were given, not scaled to the workers.
        as_given: dict[str, Any] = {**point} if sweep.varies_workers else {}
        first = seen.setdefault(dataclasses.replace(trial.config, name=None, **as_given), trial)
        if first is not trial:
            raise UsageError(
                f"--vary: {as_typed(first.values)} and {as_typed(trial.values)} result in the same options; leave one "
                "out, or vary the option that overrides it."
            )
    return trials


def trial_of(sweep: Sweep, config: TrainConfig, name: str, number: int, point: Point) -> Trial:
    """Return the trial of the sweep called ``name`` with this ``number``, from 0, and this ``point``.

    Its batch size and learning rate are scaled to its workers, which are one unless ``config`` or the point gives
    another number. Raises UsageError if its name or its options are not allowed.
    """
    trial_name = check_name(trial_names(sweep, name)[number])
    values: dict[str, Any] = {"workers": 1 if config.workers == "auto" else config.workers, **point}
    # --max-cost limits the whole sweep, which checks it itself.
    options = dataclasses.replace(config, **values, name=trial_name, resume=False, max_cost=None)
    metric = BestMetric(config.best_metric, is_lower_better(config.best_metric, config))
    return Trial(trial_name, point, options.scaled_to(int(options.workers)), metric)


def trial_names(sweep: Sweep, name: str) -> list[str]:
    """Return the names of all trials of the sweep called ``name``, in the order of its points: NAME-00, NAME-01, …"""
    return [f"{name}-{number:0{num_digits(sweep)}d}" for number in range(sweep.num_trials)]


def num_digits(sweep: Sweep) -> int:
    """Return the number of digits in a trial's name: at least two, and as many as the last trial needs."""
    return sweep.digits or max(2, len(str(sweep.num_trials - 1)))


def sweep_of(storage: str, run: str, plans: dict[str, Sweep | None] | None = None) -> str | None:
    """Return the name of the sweep of which ``run`` is a trial, begun or not; None if it is a run of its own.

    A run of its own may be called rates-2024, beside a sweep called rates that has four trials: its names are those of
    its plan alone. ``plans`` keeps the plans that are read, for whoever asks about many runs.
    """
    match = re.fullmatch(r"(.+)-([0-9]{2,9})", run)
    if match is None:
        return None
    name, number = match[1], int(match[2])
    plans = {} if plans is None else plans
    if name not in plans:
        plans[name] = parse_sweep(read_json(run_store(storage, name).fail_fast(), SWEEP))
    sweep = plans[name]
    is_trial = sweep is not None and number < sweep.num_trials and len(match[2]) == num_digits(sweep)
    return name if is_trial else None


def names_of(storage: str, name: str) -> list[str]:
    """Return the names of all trials, begun or not, if ``name`` is a sweep; else ``name`` alone.

    Raises UsageError if there is no such run, or the sweep's document is damaged.
    """
    store = run_store(storage, name)
    if store.exists(SWEEP):
        return trial_names(read_sweep(store), name)
    open_run(storage, name)
    return [name]


def begun_trials(storage: str, name: str) -> list[str]:
    """Return the names of the trials of the sweep called ``name`` that have begun; none if it is no sweep."""
    sweep = parse_sweep(read_json(run_store(storage, name), SWEEP))
    names = [] if sweep is None else trial_names(sweep, name)
    return [trial_name for trial_name in names if run_store(storage, trial_name).exists(CONFIG)]


def as_typed(values: Mapping[str, Any]) -> str:
    """Return varied values as a user types them: ``learning-rate=0.1 nesterov=true``."""
    return " ".join(f"{option_name(name)}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """Return one varied value as a user types it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def check_names_free(sweep: Sweep, storage: str, name: str) -> None:
    """Raise UsageError if a run in ``storage`` has the name of a trial, begun or not, of the new sweep ``name``."""
    for trial_name in trial_names(sweep, name):
        if run_store(storage, trial_name).exists(CONFIG):
            raise UsageError(
                f"A run called {trial_name!r} is in {storage} already; choose another --name for the sweep."
            )
