"""Trackers by name, and `raytrain track`, which sends a stored history to one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeAlias, cast

from raytrain.config.extras import extra
from raytrain.config.named_functions import load_function
from raytrain.config.option_values import Location
from raytrain.errors import RaytrainError, UsageError, did_you_mean
from raytrain.monitor.events import Event, TrackerFailed, TrackerOpened
from raytrain.runs.documents import SWEEP, open_run, read_config, run_names, run_store
from raytrain.runs.status import read_status
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.runs.stored_rows import read_rows
from raytrain.storage.open import open_store
from raytrain.trackers.tracker import TrackedRun, TrackedSweep, Tracker, hyperparams
from raytrain.trackers.tracker_threads import End, NamedTracker, TrackerThread

Trackers: TypeAlias = "str | Tracker | Sequence[str | Tracker]"
"""A name of a tracker, an object that is one, or several of these."""
_BUILT_IN = {
    "tensorboard": ("raytrain.trackers.tensorboard", "TensorBoardTracker", "tensorboardX"),
    "mlflow": ("raytrain.trackers.mlflow", "MLflowTracker", "mlflow"),
    "wandb": ("raytrain.trackers.wandb", "WandbTracker", "wandb"),
    "prometheus": ("raytrain.trackers.prometheus", "PrometheusTracker", "prometheus_client"),
}
"""Module, class, and required package of each tracker. The extra called like the tracker installs the package."""


def open_trackers(*several: Trackers) -> list[NamedTracker]:
    """Return the trackers of a run, each under a name of its own; each is opened later, in its thread.

    A repeated name counts once, and the second object of one class is called ``Class#2``. Raises UsageError for what is
    no tracker, and for a tracker whose package or module cannot be imported::

        open_trackers(["tensorboard", "mlflow"], CSVLogger("logs"))
    """
    trackers = [tracker for names_or_objects in several for tracker in _as_list(names_or_objects)]
    named_trackers: list[NamedTracker] = []
    for index, tracker in enumerate(trackers):
        if isinstance(tracker, str) and tracker in trackers[:index]:
            continue
        named = _named_tracker(tracker)
        num_earlier = sum(earlier.name.partition("#")[0] == named.name for earlier in named_trackers)
        if num_earlier:
            named = replace(named, name=f"{named.name}#{num_earlier + 1}")
        named_trackers.append(named)
    return named_trackers


def _as_list(trackers: object) -> list[object]:
    """Return the elements of ``trackers``. A name, a tracker, or an object that cannot be iterated is the only one."""
    if isinstance(trackers, (str, Tracker)) or not isinstance(trackers, Iterable):
        return [trackers]
    return list(cast("Iterable[object]", trackers))


def _named_tracker(tracker: object) -> NamedTracker:
    """Return a tracker, which may be given as an object or by name, with its name.

    Raises UsageError if ``tracker`` is neither a tracker nor the name of one, if the package that it needs is missing,
    or if the user's module cannot be imported.
    """
    # An object of the user's.
    if not isinstance(tracker, str):
        if isinstance(tracker, type) or not isinstance(tracker, Tracker):
            raise UsageError(
                f"trackers has {tracker!r}, which is no tracker: it needs the methods log_hyperparams, log_metrics and "
                "finalize."
            )
        return NamedTracker(type(tracker).__name__, lambda run: tracker)

    # The name of a built-in tracker, whose package may be missing.
    if tracker in _BUILT_IN:
        module, class_name, package = _BUILT_IN[tracker]
        if find_spec(package) is None:
            raise UsageError(f"--track {tracker} needs {package}, which is not installed; install {extra(tracker)}.")
        return NamedTracker(tracker, lambda run: getattr(import_module(module), class_name)(run))

    # The name of a class of the user's.
    if ":" not in tracker:
        hint = did_you_mean(tracker, _BUILT_IN)
        built_in = ", ".join(_BUILT_IN)
        raise UsageError(f"There is no tracker {tracker!r}{hint}; give {built_in}, or package.module:Class.")
    make = load_function("--track", tracker)
    return NamedTracker(tracker, lambda run: _make_tracker(make))


def _make_tracker(make: Callable[[], object]) -> Tracker:
    """Call a class or a function of the user's; raise UsageError unless it returns a tracker."""
    tracker = make()
    if isinstance(tracker, type) or not isinstance(tracker, Tracker):
        returned = "nothing" if tracker is None else f"{tracker!r}, which is no tracker"
        raise UsageError(
            f"it returned {returned}; return an object with the methods log_hyperparams, log_metrics and finalize"
        )
    return tracker


@dataclass(frozen=True)
class TrackResult:
    """The trackers to which the history of ``run`` was sent, or the histories of all trials of a sweep.

    ``rows`` includes rows that were sent before; ``places`` are URLs, or commands that show the runs.
    """

    run: str
    trackers: list[str]
    rows: int
    places: list[str]

    def summary(self) -> dict[str, Any]:
        """Return the result as a dictionary of plain values."""
        return asdict(self)


def track(run: str, trackers: Trackers, *, storage: Location = "./runs") -> TrackResult:
    """Send the history and the last checkpoint of a run that is over, without what the trackers have already.

    For a sweep, send all its trials; a tracker shows them together, as it does while they train. ``trackers`` are names
    or objects, as for :func:`raytrain.train`, but only names for a sweep. Raises UsageError if the run still trains,
    and RaytrainError with the reason if a tracker fails::

        raytrain.track("first", ["mlflow"]).places
    """
    if not trackers:
        raise UsageError("--track is missing; name a tracker, such as tensorboard or mlflow.")

    # A run that is no sweep is sent by itself.
    storage = os.fspath(storage)
    store = open_run(storage, run)
    if not store.exists(SWEEP):
        return _track_run(run, trackers, storage)

    # To the trackers, each trial is a run of its own. Several trials may be shown at one place, which counts once.
    if read_status(store).active:
        raise UsageError(f"Sweep {run!r} is training; `raytrain sweep … --track` sends its trials while they train.")
    if not all(isinstance(tracker, str) for tracker in _as_list(trackers)):
        raise UsageError(f"{run!r} is a sweep, and an object takes one run; name trackers, or send trial by trial.")
    sent = [
        _track_run(name, trackers, storage)
        for name in run_names(open_store(storage))
        if re.fullmatch(rf"{re.escape(run)}-\d+", name)
    ]
    places = dict.fromkeys(place for trial in sent for place in trial.places)
    used = dict.fromkeys(name for trial in sent for name in trial.trackers)
    return TrackResult(run, [*used], sum(trial.rows for trial in sent), [*places])


def _track_run(run: str, trackers: Trackers, storage: str) -> TrackResult:
    """Send the history of one run; raise as :func:`track` does."""
    store = open_run(storage, run)
    status = read_status(store)
    if status.active:
        raise UsageError(f"Run {run!r} is training; `raytrain train … --track` sends it while it trains.")
    params = hyperparams(read_config(store))
    end = End("failed") if status.status == "failed" else End("success", newest_checkpoint(store))

    # A trial is shown with the others of its sweep. Its name is that of the sweep and a number, such as rates-3.
    sweep: TrackedSweep | None = None
    if (trial := re.fullmatch(r"(.+)-\d+", run)) and run_store(storage, trial[1]).exists(SWEEP):
        sweep = TrackedSweep(trial[1], run_store(storage, trial[1]))

    # Each tracker gets the rows in a thread of its own, as while a run trains. Failures there become events.
    events: list[Event] = []
    tracked = TrackedRun(run, store, sweep=sweep)
    threads = [TrackerThread(tracker, tracked, params, events.append) for tracker in open_trackers(trackers)]
    for thread in threads:
        thread.send(chain.from_iterable(read_rows(store)))  # an iterator: the thread reads the rows as it sends them
        thread.end(end)
    for thread in threads:
        thread.join(None)  # however long that takes
    if failures := [event for event in events if isinstance(event, TrackerFailed)]:
        reasons = "; ".join(f"tracker {event.tracker} {event.reason}" for event in failures)
        raise RaytrainError(f"Not all of run {run!r} was sent: {reasons}; once that is repaired, send it again.")
    places = [event.place for event in events if isinstance(event, TrackerOpened)]
    num_rows = threads[0].num_rows  # the same for all, which read the same history
    return TrackResult(run, [thread.name for thread in threads], num_rows, places)
