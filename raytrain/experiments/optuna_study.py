"""A sweep's study in Optuna, whose sampler chooses points and whose pruner stops trials.

The study is in memory. What is stored is a log of plain values, ``study.jsonl`` in the sweep's folder: which points the
sampler has chosen, what was measured of which trial, and how trials ended, in the order in which that happened. A sweep
that resumes plays the log to a new study, which is then as the old one was: each point is chosen by a sampler with a
seed of its own, so that it depends on nothing but the log. Optuna's own storages are not used, for two reasons: none of
them is made for a bucket, and they hold pickled objects, in whose place whoever can write to the storage could put code
of theirs.

The documents of the trials are the truth. What a process that was killed had not yet logged is added from them, and
what is in the log already is not counted again.
"""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from raytrain.config.extras import extra
from raytrain.errors import UsageError
from raytrain.experiments.search_space import Point, Pruner, Range, Sampler, Space, points
from raytrain.runs.documents import STUDY, parse_lines
from raytrain.runs.line_file import LineFile, StoredLines

if TYPE_CHECKING:
    import optuna

    from raytrain.storage.store import Store

_NEEDS = {"cmaes": "cmaes", "gp": "scipy", "qmc": "scipy"}  # packages that samplers need besides Optuna
_CHOICES_PER_POINT = 20  # of the sampler, before chance chooses in its place


def check_optuna(sampler: Sampler | None, pruner: Pruner | None) -> None:
    """Raise UsageError if Optuna, or a package that its ``sampler`` needs, is not installed."""
    option, name = ("--sampler", sampler) if sampler else ("--pruner", pruner)
    missing = next(
        (package for package in ("optuna", _NEEDS.get(str(sampler))) if package and not find_spec(package)), None
    )
    if name is not None and missing is not None:
        raise UsageError(f"{option} {name} needs {missing}, which is not installed; install {extra('optuna')}.")


class SweepStudy:
    """The study of a sweep, from any thread; with the trials of its log, if the sweep resumes.

    Trials have numbers from 0 on, values are those of the metric that the sweep compares its trials by.

    Args:
        store: the sweep's place in storage.
        space: what its trials differ in.
        sampler: who chooses its points; None if the sweep :meth:`give`-s them.
        pruner: who stops trials early; None if nobody of Optuna's does.
        seed: the seed of the sampler.
        is_lower_better: True if the smallest value is the best.
        num_epochs: the epochs of its longest trial.
        is_resumed: True if it goes on from the stored log, which is emptied otherwise.

    Example::

        study = SweepStudy(store, space, sampler="tpe", pruner="median", seed=0, is_lower_better=False, num_epochs=10)
        point = study.choose(lambda point: True)
        study.is_worse(0, epoch=1, value=0.5)
        study.end(0, 0.7, is_pruned=False)
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        *,
        sampler: Sampler | None,
        pruner: Pruner | None,
        seed: int,
        is_lower_better: bool,
        num_epochs: int,
        is_resumed: bool = False,
    ) -> None:
        import optuna  # takes a while

        self._space = space
        self._sampler: Sampler | None = sampler
        self.pruner: Pruner | None = pruner
        """The pruner that stops trials early; None if none of Optuna's does."""
        self._seed = seed
        self._lock = threading.RLock()
        self._log: LineFile[dict[str, Any]] = LineFile(store, STUDY, dict, dict)
        self._write_after_s = 0.0
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        for name, domain in space.items():
            if not isinstance(domain, Range):
                distribution = optuna.distributions.CategoricalDistribution(domain)
            elif domain.whole:
                distribution = optuna.distributions.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
            else:
                distribution = optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
            self._distributions[name] = distribution

        # Optuna says on standard error that a study was made, where the picture of the sweep is.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            study_name=store.url.rstrip("/").rpartition("/")[2],  # Hyperband assigns trials to brackets by it
            direction="minimize" if is_lower_better else "maximize",
            sampler=optuna.samplers.RandomSampler(),
            pruner=_pruner(pruner, num_epochs),
        )
        optuna.logging.set_verbosity(verbosity)
        self._trials: list[optuna.Trial] = []
        self.points: list[Point] = []
        """The points of its trials, by number."""
        self._decisions: dict[tuple[int, int], bool] = {}  # by trial and epoch
        self._ended: set[int] = set()
        self._num_choices = 0  # of the sampler, also those that were not taken
        self._is_playing = is_resumed
        if not is_resumed:
            self._log.cut(lambda event: False)
        else:
            lines = (line for block in StoredLines(store, STUDY).blocks() for line in block.splitlines())
            for event in parse_lines(dict, lines):
                with suppress(KeyError, IndexError, TypeError, ValueError):  # whoever wrote the storage made it up
                    self._play(event)
        self._is_playing = False

    def choose(self, accepts: Callable[[Point], bool]) -> Point | None:
        """Return the point of the next trial, which differs from all before it and which ``accepts`` lets pass.

        If the sampler insists on others, chance chooses in its place. Return None if there is no further point.
        """
        with self._lock:
            for _ in range(_CHOICES_PER_POINT):
                trial = self._ask()
                point = {name: trial.params[name] for name in self._space}
                if point not in self.points and accepts(point):
                    self._add("chosen", trial, point)
                    break
                self._refuse(trial, point)
            else:
                # Of one point more than there are, at least one is new.
                try:
                    drawn = points(self._space, len(self.points) + 1, self._seed_of_choice())
                except UsageError:  # there are not so many
                    return None
                new = next((point for point in drawn if point not in self.points and accepts(point)), None)
                if new is None:
                    return None
                self.give(point := new)
        self._log.write()  # before the trial starts, so that a resumed sweep knows of it
        return point

    def give(self, point: Point) -> None:
        """Take a point that the sampler has not chosen as that of the next trial."""
        with self._lock:
            self._study.enqueue_trial(dict(point))
            self._add("given", self._study.ask(self._distributions), point)

    def is_worse(self, number: int, epoch: int, value: float) -> bool:
        """Note a trial's ``value`` after ``epoch``; True if the pruner stops the trial.

        What a trial that was interrupted measures again changes nothing: the pruner says what it has said before.
        """
        value = value if math.isfinite(value) else math.nan  # as the log has it, in which an infinite one is null
        with self._lock:
            if (number, epoch) not in self._decisions and number not in self._ended:
                self._trials[number].report(value, epoch)
                self._record({"event": "measured", "trial": number, "epoch": epoch, "value": value})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of numpy, if all values are NaN
                    self._decisions[number, epoch] = self._trials[number].should_prune()
            return self._decisions.get((number, epoch), False)

    def end(self, number: int, value: float | None, *, is_pruned: bool) -> None:
        """Note that a trial has nothing left to do, and its best ``value``; without one, only if it was pruned."""
        from optuna.trial import TrialState

        with self._lock:
            if number in self._ended or (value is None and not is_pruned):
                return
            if is_pruned:
                self._study.tell(self._trials[number], state=TrialState.PRUNED)
            else:
                self._study.tell(self._trials[number], value)
            self._ended.add(number)
            self._record({"event": "ended", "trial": number, "value": value, "pruned": is_pruned})

    def write(self) -> None:
        """Append new trials and values to the log, unless storage is to be left alone for now; raise StorageError."""
        if time.monotonic() >= self._write_after_s:
            self._log.write()
            self._write_after_s = time.monotonic() + self._log.pause_s()

    def close(self) -> None:
        """Append the rest to the log; raise StorageError."""
        self._log.write()

    def _ask(self) -> optuna.Trial:
        """Ask the sampler for the point of a trial, with the seed of this choice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that a sampler is experimental
            self._study.sampler = _sampler(self._sampler, self._seed, self._seed_of_choice())
            self._num_choices += 1
            return self._study.ask(self._distributions)

    def _seed_of_choice(self) -> int:
        return random.Random(f"{self._seed}/{self._num_choices}").getrandbits(32)

    def _refuse(self, trial: optuna.Trial, point: Point) -> None:
        """Say that the point of a trial cannot be tried."""
        from optuna.trial import TrialState

        self._study.tell(trial, state=TrialState.FAIL)
        self._record({"event": "refused", "values": point})

    def _add(self, event: str, trial: optuna.Trial, point: Point) -> None:
        self._trials.append(trial)
        self.points.append(point)
        self._record({"event": event, "values": point})

    def _record(self, event: dict[str, Any]) -> None:
        if not self._is_playing:
            self._log.extend([event])

    def _play(self, event: dict[str, Any]) -> None:
        """Repeat the events of the log. Raise KeyError, IndexError, TypeError or ValueError if one is impossible."""
        kind = event["event"]
        if kind == "measured":
            value = event["value"]
            self.is_worse(event["trial"], event["epoch"], math.nan if value is None else value)
            return
        if kind == "ended":
            self.end(event["trial"], event["value"], is_pruned=event["pruned"] is True)
            return

        point = self._point_of(event["values"])
        if kind == "given":
            self.give(point)
            return
        # Only these samplers keep something of each point that they have chosen; others know it from the trials alone.
        if self._sampler in ("cmaes", "qmc"):
            trial = self._ask()
        else:
            self._num_choices += 1
            self._study.enqueue_trial(dict(point))
            trial = self._study.ask(self._distributions)
        if kind == "refused":
            self._refuse(trial, point)
        elif trial.params == point:
            self._add(kind, trial, point)
        else:  # another version of Optuna chooses another one
            self._refuse(trial, point)
            self.give(point)

    def _point_of(self, values: dict[str, Any]) -> Point:
        """Return the point that the log names; raise ValueError if it is not in the space."""
        for name, domain in self._space.items():
            value = values[name]
            in_domain = domain.low <= value <= domain.high if isinstance(domain, Range) else value in domain
            if not in_domain:
                raise ValueError(f"{name} cannot be {value!r}")
        return {name: values[name] for name in self._space}


def _sampler(name: Sampler | None, seed: int, seed_of_choice: int) -> optuna.samplers.BaseSampler:
    """Return a sampler of Optuna's with Optuna's own defaults."""
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(seed=seed_of_choice)
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=seed_of_choice, warn_independent_sampling=False)
    if name == "gp":
        return samplers.GPSampler(seed=seed_of_choice)
    if name == "qmc":  # a sequence: its seed is that of all points
        by_chance = samplers.RandomSampler(seed=seed_of_choice)
        return samplers.QMCSampler(
            scramble=True, seed=seed, independent_sampler=by_chance, warn_independent_sampling=False
        )
    return samplers.RandomSampler(seed=seed_of_choice)


def _pruner(name: Pruner | None, num_epochs: int) -> optuna.pruners.BasePruner:
    """Return a pruner of Optuna's with its own defaults, for values that are measured after epochs."""
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner()
    if name == "successive-halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1)
    if name == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=num_epochs)
    return pruners.NopPruner()
