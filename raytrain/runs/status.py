"""How far a run is, as its storage says: ``status.json``, rewritten every few seconds as a heartbeat."""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from raytrain.errors import StorageError
from raytrain.runs.documents import read_json, run_store, write_json
from raytrain.runs.layout import STATUS

if TYPE_CHECKING:
    from raytrain.storage.base import Store

HEARTBEAT_EVERY_S = 10.0
"""Seconds between two writes of a running run's status."""
_SILENT_AFTER = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far a run is, as of ``heartbeat_at`` (ISO 8601, UTC), which :func:`write_status` stamps.

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
        """Whether the run is training, or about to."""
        return self.status in ("starting", "running")


def read_status(store: Store) -> RunStatus:
    """How far the run is."""
    return parse_status(read_json(store, STATUS))


def write_status(store: Store, status: RunStatus) -> None:
    """Write how far the run is, stamped with the time and with this process."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    stamped = dataclasses.replace(status, heartbeat_at=now, host=socket.gethostname(), pid=os.getpid())
    write_json(store, STATUS, dataclasses.asdict(stamped))


def mark_failed(storage: str, name: str) -> None:
    """Mark a run that was to start again as failed; does nothing if storage is out of reach."""
    store = run_store(storage, name)
    with suppress(StorageError):
        write_status(store, dataclasses.replace(read_status(store), status="failed"))


def parse_status(document: dict[str, Any]) -> RunStatus:
    """The status in a ``status.json``; interrupted if it is empty, or active but too old to be true."""
    known: dict[str, Any] = {"status": "interrupted", **document}
    status = RunStatus(**known)
    if status.active and (_is_silent(status) or _is_gone(status)):
        return dataclasses.replace(status, status="interrupted")
    return status


def _is_silent(status: RunStatus) -> bool:
    return datetime.now(timezone.utc) - datetime.fromisoformat(status.heartbeat_at) > _SILENT_AFTER


def _is_gone(status: RunStatus) -> bool:
    """Whether the process that trained ran on this machine and has ended."""
    if status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it belongs to another user, and is alive
    return False
