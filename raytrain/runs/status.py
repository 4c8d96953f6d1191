"""``status.json``: a run's progress, rewritten every few seconds as a heartbeat.

A process that is killed cannot write that it has ended. Readers therefore take a run that claims to be active for
interrupted if its process is known to be gone, or if it has been silent for a minute.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil

from raytrain.errors import StorageError
from raytrain.runs.documents import STATUS, Report, ignore, known_fields, read_json, run_store, write_json
from raytrain.storage.store import Store

HEARTBEAT_EVERY_S = 10.0  # seconds between two writes of a running run's status
_SILENT_AFTER = timedelta(seconds=60)
_INTERRUPTED: dict[str, Any] = {"status": "interrupted"}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The progress of a run at ``heartbeat_at`` (ISO 8601, UTC), which :func:`write_status` stamps.

    ``status`` is starting, running, finished, stopped or failed. A reader also sees interrupted: the run claims to be
    active, but its process (``pid`` on ``host``) is gone or has been silent for a minute.
    """

    status: str
    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    num_epochs: int = 0
    num_workers: int = 0
    heartbeat_at: str = ""
    host: str = ""
    pid: int = 0

    @property
    def active(self) -> bool:
        """Whether the run trains, or is about to."""
        return self.status in ("starting", "running")

    @property
    def heartbeat(self) -> datetime | None:
        """``heartbeat_at`` as a time; None if it is not known."""
        with suppress(ValueError, OverflowError):
            time = datetime.fromisoformat(self.heartbeat_at).astimezone(timezone.utc)
            return time if 1970 < time.year < 9999 else None  # what every time zone can show
        return None


def read_status(store: Store, report: Report = ignore) -> RunStatus:
    """Return how far the run is; ``report`` gets a line if its document is damaged."""
    return parse_status(read_json(store, STATUS, report), report)


def write_status(store: Store, status: RunStatus) -> None:
    """Write how far the run is, stamped with the time and with this process."""
    heartbeat_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    stamped = dataclasses.replace(status, heartbeat_at=heartbeat_at, host=socket.gethostname(), pid=os.getpid())
    write_json(store, STATUS, dataclasses.asdict(stamped))


def mark_failed(storage: str, name: str) -> None:
    """Mark a run that was to start again as failed; do nothing if storage is out of reach."""
    store = run_store(storage, name)
    with suppress(StorageError):
        write_status(store, dataclasses.replace(read_status(store), status="failed"))


def parse_status(document: dict[str, Any], report: Report = ignore) -> RunStatus:
    """Return the status in a ``status.json``, interrupted if the run claims to be active and cannot be.

    ``report`` gets a line if values have another type than a status has.
    """
    known = known_fields(RunStatus, document)
    if unusable := [field.name for field in dataclasses.fields(RunStatus) if field.name in document.keys() - known]:
        report(f"{STATUS} has values of another type for {', '.join(unusable)}, which are left out")
    status = RunStatus(**{**_INTERRUPTED, **known})
    if not status.active:
        return status

    # Its process is gone if it was on this machine and has ended. A damaged number may be one that no process has.
    is_gone = False
    if status.host == socket.gethostname():
        try:
            is_gone = status.pid < 1 or not psutil.pid_exists(status.pid)
        except OverflowError:
            is_gone = True
    is_silent = status.heartbeat is None or datetime.now(timezone.utc) - status.heartbeat > _SILENT_AFTER
    return dataclasses.replace(status, status="interrupted") if is_gone or is_silent else status
