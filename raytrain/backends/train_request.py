"""What a caller of ``raytrain.train`` asks for, as every backend gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrain.backends.prepare import Loop
from raytrain.backends.stop_signals import StopSignals
from raytrain.config import TrainConfig
from raytrain.runs.snapshot import View

if TYPE_CHECKING:
    from raytrain.runs.trackers.tracker_thread import NamedTracker


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The arguments of :func:`raytrain.train`, checked.

    ``loop`` is the caller's own function; None if the options name one, or none. ``started_at`` is when the user
    started the run, as ``time.monotonic()`` tells the time.
    """

    config: TrainConfig
    loop: Loop | None
    view: View | None
    signals: StopSignals
    trackers: Sequence[NamedTracker]
    started_at: float
