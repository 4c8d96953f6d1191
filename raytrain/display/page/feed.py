"""Feed of a page's viewers: the whole run at first, then what is new."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any, NamedTuple

from raytrain.display.event_text import event_text, shown_summary, stop_text
from raytrain.display.page.curves import Curves
from raytrain.monitor.events import TimedEvent
from raytrain.monitor.snapshot import START, RowCursor, Snapshot
from raytrain.runs.documents import plain
from raytrain.runs.metric_row import Kind

_NUM_EVENTS = 500  # latest events that are shown
_NUM_MACHINES = 64  # most workers whose machines are shown
_MAX_ENCODED = 8  # most messages that are kept for viewers who have read equally far
_KINDS: tuple[Kind, ...] = ("step", "evaluation")


class _CurveCursor(NamedTuple):
    generation: int = -1
    row: int = 0


class FeedCursor(NamedTuple):
    """How far a viewer has read a run: the version of its state, and the rows of its curves."""

    version: int = 0
    event: int = 0
    step: _CurveCursor = _CurveCursor()
    evaluation: _CurveCursor = _CurveCursor()


class RunFeed:
    """Takes snapshots from one thread, and answers viewers, who keep a cursor: nothing is queued for slow ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = START
        """What to ask for the next snapshot with."""
        self._lock = threading.Lock()
        self._curves = {kind: Curves(kind) for kind in _KINDS}
        self._events: dict[int, TimedEvent] = {}
        self._state: dict[str, Any] | None = None
        self._version = 0
        self._encoded: dict[FeedCursor, bytes] = {}  # by the cursors of the viewers that asked since the last change

    def update(self, snapshot: Snapshot) -> None:
        """Take ``snapshot``, which continues the one before (see :class:`Snapshot`)."""
        with self._lock:
            if snapshot.first_row == 0 and self.rows != START:
                for curves in self._curves.values():
                    curves.clear()
            for curves in self._curves.values():
                curves.extend(snapshot.rows)
            self.rows: RowCursor = snapshot.cursor
            self._events |= {event.number: event for event in snapshot.events}
            for number in sorted(self._events)[:-_NUM_EVENTS]:
                del self._events[number]
            state = _state(snapshot)
            if state != self._state or snapshot.rows:
                self._state = state
                self._version += 1
                self._encoded.clear()

    def report(self, problem: str) -> None:
        """Show a problem until the next snapshot."""
        with self._lock:
            if self._state is not None and self._state.get("problem") != problem:
                self._state = {**self._state, "problem": problem}
                self._version += 1
                self._encoded.clear()

    def since(self, cursor: FeedCursor) -> tuple[bytes | None, FeedCursor]:
        """What a viewer at ``cursor`` lacks as JSON, None if it lacks nothing, and its next cursor."""
        with self._lock:
            if self._state is None or cursor.version == self._version:
                return None, cursor
            if cursor not in self._encoded:
                if len(self._encoded) >= _MAX_ENCODED:
                    self._encoded.clear()
                self._encoded[cursor] = json.dumps(self._message(cursor), allow_nan=False).encode()
            return self._encoded[cursor], self._cursor()

    def between(self, first_step: int, last_step: int) -> dict[str, Any]:
        """The curves of a part of the run, as finely as a screen can show them."""
        with self._lock:
            return {kind: curves.between(first_step, last_step) for kind, curves in self._curves.items()}

    def _message(self, cursor: FeedCursor) -> dict[str, Any]:
        changes = {kind: self._change(kind, getattr(cursor, kind)) for kind in _KINDS}
        events = [_event(timed) for number, timed in sorted(self._events.items()) if number >= cursor.event]
        return {"run": self.name, "state": self._state, "events": events, "curves": changes}

    def _change(self, kind: Kind, cursor: _CurveCursor) -> dict[str, Any]:
        """Buckets of a curve: those from a step on that replace what the viewer has, or all (``reset``)."""
        curves = self._curves[kind]
        reset = cursor.generation != curves.generation
        return {"reset": reset, **curves.since(0 if reset else cursor.row)}

    def _cursor(self) -> FeedCursor:
        step, evaluation = (_CurveCursor(self._curves[kind].generation, len(self._curves[kind])) for kind in _KINDS)
        return FeedCursor(self._version, max(self._events, default=-1) + 1, step, evaluation)


def _event(timed: TimedEvent) -> dict[str, Any]:
    """An event as the page gets it, which decides by its kind, and shows its text."""
    number, at_s, event = timed
    return {"number": number, "at_s": at_s, "kind": event.kind, "fields": event.fields(), "text": event_text(event)}


def _state(snapshot: Snapshot) -> dict[str, Any]:
    """Everything of a snapshot that is small."""
    omitted = ("rows", "events", "first_row", "attempt", "result", "latest", "evaluation", "stop_request", "machines")
    fields = (field.name for field in dataclasses.fields(snapshot) if field.name not in omitted)
    state = {
        **{name: getattr(snapshot, name) for name in fields},
        "epoch": snapshot.epoch,
        "num_epochs": snapshot.num_epochs,
        "over": snapshot.over,
        "machines": [dataclasses.asdict(use) for use in snapshot.machines[:_NUM_MACHINES]],
        "latest": snapshot.latest and snapshot.latest.to_json(),
        "evaluation": snapshot.evaluation and snapshot.evaluation.to_json(),
        "stop_reason": snapshot.stop_request and stop_text(snapshot.stop_request),
        "result": snapshot.result and shown_summary(snapshot.result.summary()),
    }
    return plain(state)
