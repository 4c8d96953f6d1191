"""A request to stop a run with a checkpoint.

Whoever asks (Ctrl-C, a signal, ``raytrain stop``, a handle, the monitor itself) makes a :class:`StopRequest`. It
reaches the run's monitor, through the run's storage or directly; the workers learn of it there, agree on a step, and
stop after it. Its reason stands in the summary as ``stop_reason``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from raytrain.errors import UsageError
from raytrain.runs.documents import open_run, read_json, write_json
from raytrain.runs.layout import STOP_REQUEST
from raytrain.runs.status import read_status

if TYPE_CHECKING:
    from raytrain.storage.base import Store


@dataclass(frozen=True)
class StopRequest:
    """Somebody wants a run to stop with a checkpoint. ``reason`` says who or why, such as ``Ctrl-C``."""

    reason: str


def request_stop(storage: str, name: str, request: StopRequest) -> None:
    """Leave a stop request in the storage of a run, which looks for it about once a second.

    Raises UsageError if there is no such run, or if it is not training.
    """
    store = open_run(storage, name)
    status = read_status(store)
    if not status.active:
        resume = "" if status.status == "finished" else "; resume it with --resume"
        raise UsageError(f"Run {name!r} is not training: it is {status.status} at step {status.step:,}{resume}.")
    write_json(store, STOP_REQUEST, asdict(request))


def read_stop_request(store: Store) -> StopRequest | None:
    """The stop request that lies in a run's storage, if there is one."""
    reason = read_json(store, STOP_REQUEST).get("reason")
    return StopRequest(reason) if isinstance(reason, str) else None


def clear_stop_request(store: Store) -> None:
    """Delete a stop request: it was meant for an earlier start of the run."""
    store.delete(STOP_REQUEST)
