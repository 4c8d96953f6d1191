"""What a caller of ``raytrain.train`` asks for, as every backend gets it, and what runs share that train at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.backends.placement import Placement
from raytrain.backends.prepare import Loop
from raytrain.backends.stop_signals import StopSignals
from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset
from raytrain.runs.snapshot import View

if TYPE_CHECKING:
    from raytrain.runs.trackers.tracker_thread import NamedTracker


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """What several runs of this process share that train at once, each with one worker.

    ``placement`` is each run's part of the machines. ``images`` are those of ``data``, as the backend keeps
    them decoded for all runs; None if each run reads its own.
    """

    placement: Placement
    data: Dataset
    images: Any = None


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The arguments of :func:`raytrain.train`, checked.

    ``loop`` is the caller's own function; None if the options name one, or none. ``started_at`` is when the user
    started the run, as ``time.monotonic()`` tells the time. ``group``: what it shares with runs that train beside it.
    """

    config: TrainConfig
    loop: Loop | None
    view: View | None
    signals: StopSignals
    trackers: Sequence[NamedTracker]
    started_at: float
    group: RunGroup | None = None
