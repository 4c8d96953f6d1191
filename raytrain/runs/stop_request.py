"""A request to stop a run with a checkpoint.

Whoever asks (Ctrl-C, a signal, ``raytrain stop``, a handle, the monitor itself) gives a :class:`StopReason`. It
reaches the run's monitor, through the run's storage or directly; the workers learn of it there, agree on a step, and
stop after it. The summary has it as ``stop_reason``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from raytrain.errors import UsageError
from raytrain.runs.documents import open_run, read_json, write_json
from raytrain.runs.layout import STOP_REQUEST
from raytrain.runs.outcome import StopReason
from raytrain.runs.status import read_status

if TYPE_CHECKING:
    from raytrain.storage.base import Store


def request_stop(storage: str, name: str, reason: StopReason) -> None:
    """Leave a stop request in the storage of a run, which looks for it about once a second.

    Raises UsageError if there is no such run, or if it is not training.
    """
    store = open_run(storage, name)
    status = read_status(store)
    if not status.active:
        resume = "" if status.status == "finished" else "; resume it with --resume"
        raise UsageError(f"Run {name!r} is not training: it is {status.status} at step {status.step:,}{resume}.")
    write_json(store, STOP_REQUEST, reason.to_json())


def read_stop_request(store: Store) -> StopReason | None:
    """The stop request that lies in a run's storage, if there is one."""
    with suppress(ValueError):
        return StopReason.from_json(read_json(store, STOP_REQUEST))
    return None


def clear_stop_request(store: Store) -> None:
    """Delete a stop request: it was meant for an earlier start of the run."""
    store.delete(STOP_REQUEST)
