"""Typed events of a run, whose sentences are made in ``display``: the class says what happened, the fields the rest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_type_hints

from raytrain.config.option_values import matches
from raytrain.runs.outcome import StopReason
from raytrain.runs.redact import redact

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True)
class Event:
    """Something that happened to a run and that a viewer should read."""

    kind: ClassVar[str]  # the name of the class in snake case, such as ``checkpoint_written``

    def __init_subclass__(cls) -> None:
        cls.kind = _WORD_START.sub("_", cls.__name__).lower()

    def __str__(self) -> str:
        """Return the kind and the fields in the form of the logs: ``checkpoint_written path=… step=20``."""
        fields = (f"{name}={value}" for name, value in vars(self).items() if value is not None)
        return " ".join([self.kind, *fields])

    def fields(self) -> dict[str, Any]:
        """Return the fields that are not None, as values of JSON."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value.to_json() if isinstance(value, StopReason) else value for name, value in values.items()}

    def redacted(self) -> Event:
        """Return the event without secrets in its texts, which may be messages of other programs."""
        texts = {name: redact(value) for name, value in vars(self).items() if isinstance(value, str)}
        return dataclasses.replace(self, **texts)


@dataclass(frozen=True)
class TrainingStarted(Event):
    """An attempt starts; after a resume or a failure, it continues after ``step`` completed steps."""

    num_workers: int
    step: int = 0


@dataclass(frozen=True)
class Evaluated(Event):
    """The validation images were classified."""

    epoch: int
    accuracy: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Tested(Event):
    """The test images were classified, at the end of the run."""

    accuracy: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint is in storage; ``path`` is relative to the run's folder."""

    path: str
    step: int


@dataclass(frozen=True)
class CheckpointSkipped(Event):
    """A checkpoint that was due is not written."""

    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointDamaged(Event):
    """A checkpoint cannot be read; the run resumes from the one before."""

    path: str
    reason: str


@dataclass(frozen=True)
class LossNotFinite(Event):
    """The loss is NaN or infinite; the run stops if it remains so."""

    loss: str
    step: int


@dataclass(frozen=True)
class ImageSkipped(Event):
    """The first image that cannot be used."""

    key: str
    reason: str


@dataclass(frozen=True)
class RequestsRetried(Event):
    """The first request for an image that failed and is retried."""


@dataclass(frozen=True)
class DecodedOnCpu(Event):
    """The first image that is decoded on a CPU because a GPU cannot decode its kind, ``reason``, such as "PNG"."""

    reason: str


@dataclass(frozen=True)
class StorageWaits(Event):
    """Storage does not accept the history at present; writing is retried."""

    error: str


@dataclass(frozen=True)
class StorageBack(Event):
    """Storage accepts the history again, and has all of it."""


@dataclass(frozen=True)
class DocumentLost(Event):
    """A document of the run could not be written, and writing is not retried."""

    document: str
    error: str


@dataclass(frozen=True)
class HistoryDamaged(Event):
    """Lines of the history before a resume cannot be read; the run continues without them."""

    problem: str


@dataclass(frozen=True)
class StopRequested(Event):
    """The run is asked to stop with a checkpoint."""

    reason: StopReason


@dataclass(frozen=True)
class NodeLeaving(Event):
    """Ray announced that nodes of the workers will be taken away: a checkpoint is written now."""

    num_nodes: int = 1


@dataclass(frozen=True)
class HeadSilent(Event):
    """The head of the cluster does not answer."""


@dataclass(frozen=True)
class HeadBack(Event):
    """The head of the cluster answers again."""


@dataclass(frozen=True)
class ReadersWait(Event):
    """No step is made because data tasks, of ``task_cpus`` CPUs each, find no free CPUs in the cluster."""

    task_cpus: float
    free_cpus: float
    cluster_cpus: float


@dataclass(frozen=True)
class WorkerFailed(Event):
    """A worker failed, or several workers, if ``rank`` is None."""

    reason: str
    rank: int | None = None


@dataclass(frozen=True)
class TrackerOpened(Event):
    """A tracker shows the run at ``place``: a URL, or a command."""

    tracker: str
    place: str


@dataclass(frozen=True)
class TrackerFailed(Event):
    """A tracker failed, and the run goes on without it. `raytrain track` with the name ``run`` can send the rest."""

    tracker: str
    reason: str
    run: str


@dataclass(frozen=True)
class ProvenanceChanged(Event):
    """The attempt runs with other code or packages than the one before; ``changes`` says which."""

    changes: str


@dataclass(frozen=True)
class Note(Event):
    """A warning without consequences for the run."""

    text: str


_KINDS = {kind.kind: kind for kind in Event.__subclasses__()}


class TimedEvent(NamedTuple):
    """An event of a run with its number, counted from 0, and the seconds of training at which it happened."""

    number: int
    at_s: float
    event: Event

    def to_json(self) -> dict[str, Any]:
        """Return the event as a line of events.jsonl; the number is implied by the place in the file."""
        return {"at_s": round(self.at_s, 3), "kind": self.event.kind, **self.event.fields()}


def parse_event(document: Mapping[str, Any]) -> tuple[float, Event]:
    """Return the event of a line of events.jsonl, and before it the seconds of training at which it happened.

    Raise KeyError, TypeError or ValueError if it is no event. Fields that the event's class lacks are left out.
    """
    # Check the values against the types of the class's fields: the document may be damaged, or a stranger's.
    kind = _KINDS[document["kind"]]
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name in document]
    values = {name: _checked(document[name], hints[name]) for name in names}
    return _checked(document["at_s"], float), kind(**values)


def _checked(value: object, hint: Any) -> Any:
    """Return ``value``, a field of an event in JSON, as the type ``hint`` of the field; raise ValueError otherwise."""
    if hint is StopReason:
        return StopReason.from_json(value)
    if not matches(value, hint):
        raise ValueError(f"an event has {value!r}, which is no {hint}")
    return value
