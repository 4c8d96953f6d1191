"""How far a tracker has got with a run: a document in the run's folder, so that no step is sent twice."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from raytrain.runs.documents import read_json, write_json
from raytrain.runs.layout import TRACKERS
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.stored_values import known_fields
from raytrain.storage.base import Store


@dataclass(frozen=True)
class Position:
    """The tracker's own ``id`` of the run, the last steps that it was sent, the last images, and the last network."""

    id: str | None = None
    step: int = 0
    evaluation_step: int = -1
    picture_step: int = -1
    network: str | None = None

    def precedes(self, row: MetricRow) -> bool:
        """Whether ``row`` has not been sent yet."""
        return row.step > (self.step if row.kind == "step" else self.evaluation_step)

    def after(self, row: MetricRow) -> Position:
        """The position once ``row`` has been sent."""
        if row.kind == "step":
            return dataclasses.replace(self, step=row.step)
        return dataclasses.replace(self, evaluation_step=row.step)


def read_position(store: Store, tracker: str) -> Position:
    """The position of ``tracker`` in the run's ``store``; the beginning if its document is missing or damaged."""
    return Position(**known_fields(Position, read_json(store, _path(tracker))))


def write_position(store: Store, tracker: str, position: Position) -> None:
    """Write the position of ``tracker``."""
    write_json(store, _path(tracker), dataclasses.asdict(position))


def _path(tracker: str) -> str:
    return f"{TRACKERS}{re.sub(r'[^A-Za-z0-9_.-]', '_', tracker)}.json"
