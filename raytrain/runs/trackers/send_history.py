"""``raytrain.track``: send the history of a run that is over to trackers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from raytrain.errors import RaytrainError, UsageError
from raytrain.monitor.events import Event, TrackerFailed, TrackerOpened
from raytrain.runs.checkpoint_files import newest_checkpoint
from raytrain.runs.documents import open_run, read_config
from raytrain.runs.history import read_all_metrics
from raytrain.runs.layout import SWEEP
from raytrain.runs.status import read_status
from raytrain.runs.trackers.measurements import hyperparams
from raytrain.runs.trackers.open_trackers import open_trackers
from raytrain.runs.trackers.protocol import Tracker
from raytrain.runs.trackers.tracker_thread import End, TrackerThread


@dataclass(frozen=True)
class TrackResult:
    """Where the history of ``run`` is now: ``rows`` counts those of the history, also those that were sent before.

    ``places`` has the URLs of the trackers that have one, or the commands that show them.
    """

    run: str
    trackers: list[str]
    rows: int
    places: list[str]

    def summary(self) -> dict[str, Any]:
        """The result as a dictionary of plain values."""
        return asdict(self)


def track(run: str, trackers: Sequence[str | Tracker], *, storage: str = "./runs") -> TrackResult:
    """Send the history of a run that is over, and its last checkpoint, as far as the trackers lack it.

    ``trackers`` are names or objects, as for :func:`raytrain.train`. Raises UsageError if the run still trains or is a
    sweep, and RaytrainError with what went wrong if a tracker fails.
    """
    if not trackers:
        raise UsageError("--track is missing; name a tracker, such as tensorboard or mlflow.")
    store = open_run(storage, run)
    status = read_status(store)
    if status.active:
        raise UsageError(f"Run {run!r} is training; `raytrain train … --track` sends it while it trains.")
    if store.exists(SWEEP):
        raise UsageError(f"{run!r} is a sweep; name one of its trials, which `raytrain runs` lists.")
    params = hyperparams(read_config(store))
    end = End("failed") if status.status == "failed" else End("success", newest_checkpoint(store))
    events: list[Event] = []
    threads = [TrackerThread(tracker, run, store, params, events.append) for tracker in open_trackers(trackers)]
    for thread in threads:
        thread.send(chain.from_iterable(read_all_metrics(store)))  # which the thread reads as it sends
        thread.end(end)
    for thread in threads:
        thread.join(None)  # this is what the user waits for
    if failures := [event for event in events if isinstance(event, TrackerFailed)]:
        raise RaytrainError("; ".join(f"tracker {event.tracker} {event.reason}" for event in failures))
    places = [event.place for event in events if isinstance(event, TrackerOpened)]
    return TrackResult(run, [thread.name for thread in threads], threads[0].num_rows, places)
