"""``status.json``: a run's progress, rewritten every few seconds as a heartbeat.

A process that is killed cannot write that it has ended. So readers treat a run that claims to be active as interrupted
if its process is known to be gone, or if it has not written for a minute. A clock that is wrong by a minute misleads
them. If that matters, :func:`watch_for_life` watches the run for some seconds.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil

from raytrain.errors import StorageError
from raytrain.runs.documents import CLAIM, STATUS, Report, ignore, known_fields, read_json, run_store, write_json
from raytrain.runs.ownership import machine_id
from raytrain.storage.store import Store

HEARTBEAT_EVERY_S = 10.0  # seconds between two writes of a running run's status
WATCH_S = 15.0  # seconds within which a run that trains writes its status, and renews its claim several times
_WATCH_EVERY_S = 0.5
_SILENT_AFTER = timedelta(seconds=60)
_INTERRUPTED: dict[str, Any] = {"status": "interrupted"}  # the status of a document without one


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The progress of a run at the time ``heartbeat_at`` (ISO 8601, UTC), which :func:`write_status` sets.

    ``status`` is starting, running, finished, stopped, failed or interrupted. Interrupted is a run that a second Ctrl-C
    has ended, and for a reader also one that claims to be active, but whose process (``pid`` on ``host``) is gone or
    has been silent for a minute. ``machine`` is the :func:`machine_id` of the process: containers of one host may share
    its name, but not its process numbers.
    """

    status: str
    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    num_epochs: int = 0
    num_workers: int = 0
    dollars: float | None = None  # by --price, so far
    gpu_kwh: float | None = None
    elapsed_s: float = 0.0  # on the clock of the run, of all attempts
    heartbeat_at: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0

    @property
    def min_steps_per_epoch(self) -> int:
        """The steps of an epoch, or fewer if ``--max-steps`` ends the run within an epoch."""
        return math.ceil(self.num_steps / self.num_epochs) if self.num_epochs > 0 else 1

    @property
    def active(self) -> bool:
        """True if the status says that the run trains, or is about to."""
        return self.status in ("starting", "running")

    @property
    def is_gone(self) -> bool:
        """True if the run's process is known to have ended, which is known only on its machine, in its container."""
        # Without an ID of the machine, compare the names of the hosts.
        is_here = self.machine == machine_id() if machine_id() else self.host == socket.gethostname()
        try:
            return is_here and (self.pid < 1 or not psutil.pid_exists(self.pid))
        except OverflowError:  # a damaged number that no process has
            return True

    @property
    def heartbeat(self) -> datetime | None:
        """``heartbeat_at`` as a time; None if it is unknown or damaged."""
        with suppress(ValueError, OverflowError):
            written_at = datetime.fromisoformat(self.heartbeat_at).astimezone(timezone.utc)
            return written_at if 1970 < written_at.year < 9999 else None  # what every time zone can show
        return None


def read_status(store: Store) -> RunStatus:
    """Return the status of a run as :func:`parse_status` does; interrupted if there is none, or it is damaged.

    Raises StorageError if storage is out of reach.
    """
    return parse_status(read_json(store, STATUS))


def write_status(store: Store, status: RunStatus) -> None:
    """Write the status of a run, with the present time and this process in place of those in ``status``."""
    heartbeat_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    process: dict[str, Any] = {"host": socket.gethostname(), "machine": machine_id(), "pid": os.getpid()}
    write_json(store, STATUS, dataclasses.asdict(dataclasses.replace(status, heartbeat_at=heartbeat_at, **process)))


def mark_failed(storage: str, name: str) -> None:
    """Set the status of a run that could not be restarted to failed; do nothing if storage is out of reach."""
    store = run_store(storage, name)
    with suppress(StorageError):
        write_status(store, dataclasses.replace(read_status(store), status="failed"))


def watch_for_life(store: Store) -> bool:
    """Watch a run for at most ``WATCH_S`` seconds; return True once it writes its status or renews its claim.

    Return False if it has done neither by then. Only contents are compared, no times, because the clocks of machines
    may differ.
    """
    before = [read_json(store, path) for path in (STATUS, CLAIM)]
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_WATCH_EVERY_S)
        if [read_json(store, path) for path in (STATUS, CLAIM)] != before:
            return True
    return False


def stored_status(document: dict[str, Any], report: Report = ignore) -> RunStatus:
    """Return the status in a ``status.json`` as the run wrote it, even if its process is gone.

    Values of the wrong type are left out, and ``report`` gets a sentence about them. A document without a status counts
    as interrupted.
    """
    values = known_fields(RunStatus, document)
    if unusable := [field.name for field in dataclasses.fields(RunStatus) if field.name in document.keys() - values]:
        report(f"{STATUS} has values of another type for {', '.join(unusable)}, which are left out")
    return RunStatus(**{**_INTERRUPTED, **values})


def parse_status(document: dict[str, Any], report: Report = ignore) -> RunStatus:
    """Return the status in a ``status.json``, or ``interrupted`` if the run claims to be active and cannot be.

    It cannot be active if its process is known to be gone, or has not written for a minute by this machine's clock.
    """
    status = stored_status(document, report)
    if not status.active:
        return status
    is_silent = status.heartbeat is None or datetime.now(timezone.utc) - status.heartbeat > _SILENT_AFTER
    return dataclasses.replace(status, status="interrupted") if status.is_gone or is_silent else status
