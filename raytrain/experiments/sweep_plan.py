"""The plan of a sweep: the points that it tries and what chooses them, made anew or read from its ``sweep.json``."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from raytrain.config import TrainConfig
from raytrain.config.evaluation import is_fraction
from raytrain.config.named_functions import names_own_function, stored_function_error
from raytrain.config.option_values import matches
from raytrain.errors import UsageError, format_count
from raytrain.experiments.search_space import (
    Point,
    are_points,
    check_trials,
    num_points,
    outermost_points,
    parse,
    points,
)
from raytrain.experiments.sweep_options import Pruner, Sampler, SweepOptions
from raytrain.runs.documents import SWEEP, open_run, read_json, write_json
from raytrain.runs.logs import STARTUP
from raytrain.runs.outcome import train_command
from raytrain.storage.store import Store

PLAN = STARTUP.getChild("plan")
"""Logs the plan of a sweep in one line, when it starts."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points that a sweep tries, stored in the sweep's folder so that the sweep can be resumed.

    Attributes:
        vary: the words of --vary.
        points: all points; with a sampler, those that it has chosen so far.
        trials: with a sampler, how many points it chooses, each when there is room for a trial; else None.
        sampler: a sampler of Optuna's; None if all points are known from the start.
        pruner: a pruner of Optuna's; None if there is none.
        digits: the number of digits in the names of trials; None to derive it from the number of trials. It is set if
            the sampler ran out of points, since then there are fewer trials than the names were made for.
    """

    vary: tuple[str, ...]
    points: tuple[Point, ...]
    trials: int | None = None
    sampler: Sampler | None = None
    pruner: Pruner | None = None
    digits: int | None = None

    @property
    def num_trials(self) -> int:
        """How many trials there will be, those included whose points are not chosen yet."""
        return len(self.points) if self.trials is None else self.trials

    @property
    def num_folds(self) -> int:
        """The number of folds on which each point is trained in a cross-validation; 1 without one."""
        folds = parse(self.vary).get("validation_fold")
        return len(folds) if isinstance(folds, tuple) else 1

    @property
    def varies_workers(self) -> bool:
        """True if trials differ in their number of workers, so that they train one after the other."""
        return any("workers" in point for point in self.points)

    @property
    def trains_alone(self) -> bool:
        """True if trials differ in their workers or folds, so that they train one by one, each on its own images."""
        return self.varies_workers or any("validation_fold" in point for point in self.points)


def plan_sweep(config: TrainConfig, vary: str | Sequence[str], options: SweepOptions, *, trust: bool = False) -> Sweep:
    """Return the plan of a new sweep, or, if ``config`` says so, the stored plan of one that is resumed.

    ``vary`` and ``options`` are as in :func:`raytrain.sweep`. A sweep that is resumed keeps its points and what chose
    them, so ``vary``, and in ``options`` trials, folds, sampler and pruner, may only repeat those of its start.

    Raises UsageError if ``vary`` and the folds are missing or wrong, if another option does not fit them, or if the
    run to resume does not exist, is no sweep, or was started with other arguments. Unless ``trust`` is True, also
    raises it if a stored point has a user's function as its network and ``config`` and ``vary`` do not name this
    function.

    Example: ``plan_sweep(config, ["learning-rate=0.01,0.1"], SweepOptions()).points``
    """
    # The words of --vary. A cross-validation varies the fold.
    words = [vary] if isinstance(vary, str) else vary
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f'vary is of type {type(cast(object, vary)).__name__}; give texts, as in vary=["learning-rate=0.1,0.01", '
            '"epochs=5,10"].'
        )
    folds = options.folds
    if folds is not None and folds < 2:
        raise UsageError(f"--folds is {folds}; a cross-validation has at least 2.")
    if folds is not None:
        words = [*words, "validation-fold=" + ",".join(f"{number + 1}/{folds}" for number in range(folds))]

    # The points, and what chooses them: new ones, or those of the sweep that is resumed.
    if config.resume:
        store = open_run(config.storage, config.name or "")
        if not store.exists(SWEEP):
            raise UsageError(f"Run {config.name!r} is not a sweep; resume it with `raytrain train … --resume`.")
        planned = read_sweep(store)
        _refuse_other_plan(planned, f"Sweep {config.name!r}", words, options)
        if not trust:
            _refuse_unnamed_networks(planned, config, words)
    elif not words:
        raise UsageError(
            "--vary is missing; say what differs between the trials, such as --vary learning-rate=0.01,0.1,1."
        )
    else:
        planned = _new_sweep(words, options, config.seed)

    # What stops trials early. The pruner was given, or, on a resume, at the start.
    if options.pruner is not None and not options.early_stopping:
        raise UsageError(
            f"--pruner {options.pruner} stops trials early, and --no-early-stopping does not; omit one of them."
        )
    if planned.pruner is not None and planned.trains_alone:
        raise UsageError(
            f"--pruner {planned.pruner} stops trials early, and trials that differ in --vary workers or in their folds "
            "are measured to their end; omit --pruner."
        )

    # The value of the metric of --best to which trials are timed.
    target = options.target
    highest = 1.0 if is_fraction(config.best_metric) else sys.float_info.max
    if target is not None and not (planned.varies_workers and 0 < target <= highest):
        limit = "above 0 and at most 1" if is_fraction(config.best_metric) else "above 0 and finite"
        raise UsageError(
            f"--target is {target:g}; it is a value of {config.best_metric}, {limit}, and is for a sweep that varies "
            "workers, such as --vary workers=1,2,4."
        )
    return planned


def _new_sweep(vary: Sequence[str], options: SweepOptions, seed: int) -> Sweep:
    """Return the plan of a new sweep over ``vary``."""
    trials, sampler, pruner = options.trials, options.sampler, options.pruner
    space = parse(vary)
    if sampler == "grid" and trials is not None:
        raise UsageError(
            f"--sampler grid trains every combination of values, and --trials is {trials}; omit one of them."
        )
    if sampler not in (None, "grid") and trials is None:
        raise UsageError(f"--sampler {sampler} chooses points; say how many with --trials.")
    if sampler in (None, "grid", "random"):
        # With --trials, the values of the other options are drawn, and each such point is trained on every fold.
        folds = space.pop("validation_fold", None) if trials is not None else None
        planned = points(space, trials, seed)
        if isinstance(folds, tuple):
            planned = [{**point, "validation_fold": fold} for point in planned for fold in folds]
        return Sweep(vary=tuple(vary), points=tuple(planned), pruner=pruner)

    # A sampler of Optuna's: points are chosen while the sweep trains.
    assert trials is not None
    check_trials(trials, num_points(space))
    if "workers" in space or "validation_fold" in space:
        measured = "how training scales" if "workers" in space else "each fold"
        raise UsageError(f"--sampler {sampler} chooses few points, and {measured} is measured of all; omit --sampler.")
    return Sweep(vary=tuple(vary), points=(), trials=trials, sampler=sampler, pruner=pruner)


def _refuse_other_plan(stored: Sweep, title: str, vary: Sequence[str], options: SweepOptions) -> None:
    """Raise UsageError if a resume is given a ``vary`` or ``options`` that are not those of the sweep's start."""
    # --trials may also count the points of a cross-validation, each of which is a trial on every fold.
    has_other_points = len(vary) > 0 and tuple(vary) != stored.vary
    if has_other_points or options.trials not in (None, stored.num_trials, stored.num_trials // stored.num_folds):
        raise UsageError(
            f"{title} was started with --vary {' '.join(stored.vary)} and {format_count(stored.num_trials, 'trial')}; "
            "leave --vary, --trials and --folds out to resume it, or start another sweep with another --name."
        )
    # Only a sampler of Optuna's is stored. Without one, the points are, and both grid and random may be repeated.
    may_be_repeated = (stored.sampler,) if stored.sampler else ("grid", "random")
    if options.sampler not in (None, *may_be_repeated) or options.pruner not in (None, stored.pruner):
        chosen_by = f"--sampler {stored.sampler}" if stored.sampler else "points that were chosen at its start"
        stopped_by = f"--pruner {stored.pruner}" if stored.pruner else "no --pruner"
        raise UsageError(
            f"{title} was started with {chosen_by} and {stopped_by}; leave --sampler and --pruner out to resume it, or "
            "start another sweep with another --name."
        )


def _refuse_unnamed_networks(stored: Sweep, config: TrainConfig, vary: Sequence[str]) -> None:
    """Raise UsageError if a point has a user's function as its network, and ``config`` and ``vary`` do not name it.

    Whoever can write to storage could have put it there. The points are those that are ``stored``, and those that a
    sampler will choose.
    """
    models = parse(vary).get("model")
    named_models = {config.model, *(models if isinstance(models, tuple) else ())}
    chosen_later = outermost_points(parse(stored.vary)) if stored.sampler else []
    for point in (*stored.points, *chosen_later):
        model = str(point.get("model", config.model))
        if names_own_function(model) and model not in named_models:
            document = f"{config.storage}/{config.name}/{SWEEP}"
            raise stored_function_error("model", model, document, may_be_named=True)


def sweep_command(sweep: Sweep, config: TrainConfig) -> str:
    """Return the command that starts the sweep, whose trials share the options of ``config``."""
    words = [train_command(config, "sweep"), "--vary", *map(shlex.quote, sweep.vary)]
    # Points were drawn or chosen unless they are all. In a cross-validation, each of them is a trial on every fold.
    if sweep.sampler or num_points(parse(sweep.vary)) != sweep.num_trials:
        words += ["--trials", str(sweep.num_trials // sweep.num_folds)]
    if sweep.sampler:
        words += ["--sampler", sweep.sampler]
    if sweep.pruner:
        words += ["--pruner", sweep.pruner]
    return " ".join(words)


def write_sweep(store: Store, sweep: Sweep) -> None:
    """Write the points that the sweep tries into its folder."""
    write_json(store, SWEEP, dataclasses.asdict(sweep))


def read_sweep(store: Store) -> Sweep:
    """Read the ``sweep.json`` in a sweep's folder; raise UsageError if it is missing or damaged."""
    sweep = parse_sweep(read_json(store, SWEEP))
    if sweep is None:
        raise UsageError(f"{store.url}/{SWEEP} is damaged, or no sweep's; start another sweep with another --name.")
    return sweep


def parse_sweep(document: dict[str, Any]) -> Sweep | None:
    """Return the sweep in a ``sweep.json``; None if it is damaged, or a point sets an option that may not vary."""
    if not matches(document.get("vary"), list[str]) or not are_points(document.get("points")):
        return None
    try:
        parse(document["vary"])
    except UsageError:
        return None

    # The number of trials is stored if, and only if, a sampler chooses the points later.
    trials, sampler, pruner, digits = (document.get(name) for name in ("trials", "sampler", "pruner", "digits"))
    if sampler not in (None, *get_args(Sampler)) or pruner not in (None, *get_args(Pruner)):
        return None
    if not (trials is None if sampler is None else isinstance(trials, int)):
        return None
    if len(document["points"]) > (trials or math.inf) or digits not in (None, *range(2, 10)):
        return None
    vary, tried = tuple(document["vary"]), tuple(document["points"])
    return Sweep(vary=vary, points=tried, trials=trials, sampler=sampler, pruner=pruner, digits=digits)
