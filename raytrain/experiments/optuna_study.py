"""A sweep's study in Optuna, whose sampler chooses points and whose pruner stops trials.

The study is kept in memory. Storage has a log of plain values, ``study.jsonl`` in the sweep's folder: the points that
the sampler chose, the values that trials measured, and how trials ended, in the order of these events. A sweep that
resumes replays the log into a new study, which is then equal to the old one: each point is chosen by a sampler with a
seed of its own, so that it depends on nothing but the log. Optuna's own storages are not used, for two reasons. None of
them works with a bucket, and they hold pickled objects, in whose place anyone who can write there could put code.

Where log and documents of the trials disagree, the documents count: events that a killed process had not logged yet are
added from them, and events that are in the log are not counted twice.
"""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from raytrain.config.extras import require_package
from raytrain.errors import UsageError
from raytrain.experiments.search_space import Point, Range, Space, points
from raytrain.experiments.sweep_options import Pruner, Sampler
from raytrain.runs.documents import STUDY, parse_lines
from raytrain.runs.line_file import LineFile, StoredLines

if TYPE_CHECKING:
    import optuna

    from raytrain.storage.store import Store

_PACKAGE_OF_SAMPLER = {"cmaes": "cmaes", "gp": "scipy", "qmc": "scipy"}  # which the sampler needs besides Optuna
_CHOICES_PER_POINT = 20  # of the sampler, before chance chooses in its place


def check_optuna(sampler: Sampler | None, pruner: Pruner | None) -> None:
    """Raise UsageError if a sampler or pruner of Optuna's is given, and a package that it needs is not installed."""
    if sampler is not None or pruner is not None:
        option = f"--sampler {sampler}" if sampler else f"--pruner {pruner}"
        for package in ("optuna", _PACKAGE_OF_SAMPLER.get(sampler or "", "optuna")):
            require_package(option, package, "optuna")


class SweepStudy:
    """The study of a sweep, which any thread may use; if the sweep resumes, it has the trials of the stored log.

    Trials are numbered from 0. Their values are those of the metric by which the sweep compares trials. Without a
    ``sampler``, the sweep gives all points by :meth:`give`; without a ``pruner``, none of Optuna's stops trials. The
    longest trial has ``num_epochs``. The log is emptied, unless ``is_resumed``: then it is replayed.

    Example::

        study = SweepStudy(store, space, sampler="tpe", pruner="median", seed=0, is_lower_better=False, num_epochs=10)
        point = study.choose(lambda point: True)
        stops = study.judge_value(0, epoch=1, value=0.5)
        study.end(0, 0.7, is_pruned=stops)
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
        self._seed = seed
        self._lock = threading.RLock()
        self._log: LineFile[dict[str, Any]] = LineFile(store, STUDY, dict, dict)
        self._write_after_s = 0.0  # on the monotonic clock: writes before are left out, as storage needs a pause
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        for name, domain in space.items():
            if not isinstance(domain, Range):
                distribution = optuna.distributions.CategoricalDistribution(domain)
            elif domain.whole:
                distribution = optuna.distributions.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
            else:
                distribution = optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
            self._distributions[name] = distribution

        # Optuna would log the new study on standard error, in the middle of the table that the terminal shows.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            study_name=store.url.rstrip("/").rpartition("/")[2],  # Hyperband assigns trials to brackets by it
            direction="minimize" if is_lower_better else "maximize",
            sampler=optuna.samplers.RandomSampler(),  # _ask replaces it before each choice
            pruner=_pruner(pruner, num_epochs),
        )
        optuna.logging.set_verbosity(verbosity)
        self._trials: list[optuna.Trial] = []
        self.points: list[Point] = []
        """The point of each trial, in the order of their numbers."""
        self._stops: dict[tuple[int, int], bool] = {}  # by trial and epoch: whether the pruner stops the trial after it
        self._ended: set[int] = set()  # numbers of the trials that are over
        self._num_choices = 0  # of the sampler, those that were refused included

        # Replay the log of a sweep that resumes. Events that are replayed are not logged again.
        self._is_replaying = is_resumed
        if not is_resumed:
            self._log.cut(lambda event: False)  # keeps no event of an earlier study
        else:
            lines = (line for block in StoredLines(store, STUDY).blocks() for line in block.splitlines())
            for event in parse_lines(dict, lines):
                with suppress(KeyError, IndexError, TypeError, ValueError):  # an impossible event, of a damaged log
                    self._replay(event)
        self._is_replaying = False

    def choose(self, accepts: Callable[[Point], bool]) -> Point | None:
        """Return the point of the next trial, one that is new and for which ``accepts`` returns True.

        If 20 choices of the sampler are known already or refused, draw a point at random instead. Return None if no new
        point is left, or 20 new ones that were drawn are refused. The point is in the stored log before this returns;
        raises StorageError if it cannot be written.
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
                if (point := self._draw(accepts)) is None:
                    return None
                self.give(point)
        self._log.write()  # before the trial starts, so that a resumed sweep knows of it
        return point

    def _draw(self, accepts: Callable[[Point], bool]) -> Point | None:
        """Draw points at random until ``accepts`` takes a new one; None if no new one is left, or 20 are refused."""
        # Points that are drawn together are all different, so of n more than there are trials, at least n are new.
        # Drawn with one seed, a longer list begins with the shorter one: each round adds one point to try.
        seed = self._seed_of_choice()
        for num_more in range(1, _CHOICES_PER_POINT + 1):
            try:
                drawn = points(self._space, len(self.points) + num_more, seed)
            except UsageError:  # the space has no further point
                return None
            accepted = next((point for point in drawn if point not in self.points and accepts(point)), None)
            if accepted is not None:
                return accepted
        return None

    def give(self, point: Point) -> None:
        """Make ``point``, which the sampler has not chosen, the point of the next trial."""
        with self._lock:
            self._study.enqueue_trial(dict(point))
            self._add("given", self._study.ask(self._distributions), point)

    def judge_value(self, number: int, epoch: int, value: float) -> bool:
        """Note the ``value`` of trial ``number`` after ``epoch``; return True if the pruner stops the trial.

        A resumed trial may measure the same epoch again: that changes nothing, and the decision is the earlier one. The
        value of a trial that is over is not noted, and stops nothing.
        """
        value = value if math.isfinite(value) else math.nan  # infinite too: the log stores all of them as null
        with self._lock:
            if (number, epoch) not in self._stops and number not in self._ended:
                self._trials[number].report(value, epoch)
                self._record({"event": "measured", "trial": number, "epoch": epoch, "value": value})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of numpy, if all values are NaN
                    self._stops[number, epoch] = self._trials[number].should_prune()
            return self._stops.get((number, epoch), False)

    def end(self, number: int, value: float | None, *, is_pruned: bool) -> None:
        """Note that a trial is over, with its best ``value``; the first end of a trial counts.

        A trial without a value is noted only if it was pruned, because Optuna takes no other one without.
        """
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

    def write(self, *, now: bool = False) -> None:
        """Append new events to the stored log, if ``now`` or storage needs no pause; raise StorageError on failure."""
        if now or time.monotonic() >= self._write_after_s:
            self._log.write()
            self._write_after_s = time.monotonic() + self._log.pause_s()

    def _ask(self) -> optuna.Trial:
        """Ask the sampler for the point of a trial; each choice has a seed of its own."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that a sampler is experimental
            self._study.sampler = _sampler(self._sampler, self._seed, self._seed_of_choice())
            self._num_choices += 1
            return self._study.ask(self._distributions)

    def _seed_of_choice(self) -> int:
        """Return the seed of the sampler's next choice: it depends on the sweep's seed and the choices so far alone."""
        return random.Random(f"{self._seed}/{self._num_choices}").getrandbits(32)

    def _refuse(self, trial: optuna.Trial, point: Point) -> None:
        """End Optuna's ``trial`` as failed, since its ``point`` is not tried, and record that."""
        from optuna.trial import TrialState

        self._study.tell(trial, state=TrialState.FAIL)
        self._record({"event": "refused", "values": point})

    def _add(self, event: str, trial: optuna.Trial, point: Point) -> None:
        """Add the next trial, and record its point: the ``event`` is ``chosen`` by the sampler or ``given`` to it."""
        self._trials.append(trial)
        self.points.append(point)
        self._record({"event": event, "values": point})

    def _record(self, event: dict[str, Any]) -> None:
        """Add an event to the log, unless it comes from there."""
        if not self._is_replaying:
            self._log.extend([event])

    def _replay(self, event: dict[str, Any]) -> None:
        """Repeat an event of the log. Raise KeyError, IndexError, TypeError or ValueError if it is impossible."""
        kind = event["event"]
        if kind == "measured":
            value = event["value"]
            self.judge_value(event["trial"], event["epoch"], math.nan if value is None else value)
            return
        if kind == "ended":
            self.end(event["trial"], event["value"], is_pruned=event["pruned"] is True)
            return

        point = self._point_of(event["values"])
        if kind == "given":
            self.give(point)
            return

        # A choice of the sampler. cmaes and qmc keep a state that each choice changes, so they must choose again. The
        # others look only at the trials, so the study gets the logged point, which saves the time of a choice.
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
        else:  # another version of Optuna chose another point: the logged one takes its place
            self._refuse(trial, point)
            self.give(point)

    def _point_of(self, values: dict[str, Any]) -> Point:
        """Return the point of a logged event; raise an error as :meth:`_replay` does if it is not in the space."""
        for name, domain in self._space.items():
            value = values[name]
            is_in_domain = domain.low <= value <= domain.high if isinstance(domain, Range) else value in domain
            if not is_in_domain:
                raise ValueError(f"{name} cannot be {value!r}")
        return {name: values[name] for name in self._space}


def _sampler(name: Sampler | None, seed: int, seed_of_choice: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of Optuna's called ``name``; without a name, one that draws at random.

    Each choice gets a new sampler with a seed of its own, ``seed_of_choice``, so that it depends on the log alone. Only
    the points of qmc form one sequence, whose seed is the sweep's ``seed``.
    """
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(seed=seed_of_choice)
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=seed_of_choice, warn_independent_sampling=False)
    if name == "gp":
        return samplers.GPSampler(seed=seed_of_choice)
    if name == "qmc":
        by_chance = samplers.RandomSampler(seed=seed_of_choice)
        return samplers.QMCSampler(
            scramble=True, seed=seed, independent_sampler=by_chance, warn_independent_sampling=False
        )
    return samplers.RandomSampler(seed=seed_of_choice)


def _pruner(name: Pruner | None, num_epochs: int) -> optuna.pruners.BasePruner:
    """Return a pruner of Optuna's with its own defaults; without a name, one that stops no trial."""
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner()
    if name == "successive-halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1)
    if name == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=num_epochs)
    return pruners.NopPruner()
