"""`raytrain track`: sends the stored history of a run, or of all trials of a sweep, to trackers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import chain

from raytrain.config.option_values import Location
from raytrain.errors import RaytrainError, UsageError
from raytrain.experiments.trials import names_of, sweep_of
from raytrain.monitor.events import Event, TrackerFailed, TrackerOpened
from raytrain.runs.documents import CONFIG, SWEEP, open_run, read_config, run_store
from raytrain.runs.status import read_status
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.runs.stored_rows import read_rows
from raytrain.trackers.open_trackers import Trackers, as_list, open_trackers
from raytrain.trackers.tracker import TrackedRun, TrackedSweep, hyperparams
from raytrain.trackers.tracker_threads import End, TrackerThread


@dataclass(frozen=True)
class TrackResult:
    """The trackers to which the history of ``run`` was sent, or the histories of all trials of a sweep.

    ``rows`` includes rows that were sent before; ``places`` are URLs, or commands that show the runs.
    """

    run: str
    trackers: list[str]
    rows: int
    places: list[str]


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
    if not all(isinstance(tracker, str) for tracker in as_list(trackers)):
        raise UsageError(f"{run!r} is a sweep, and an object takes one run; name trackers, or send trial by trial.")
    begun = [name for name in names_of(storage, run) if run_store(storage, name).exists(CONFIG)]
    sent = [_track_run(name, trackers, storage) for name in begun]
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

    # A trial is shown with the others of its sweep.
    name = sweep_of(storage, run)
    sweep = None if name is None else TrackedSweep(name, run_store(storage, name))

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
