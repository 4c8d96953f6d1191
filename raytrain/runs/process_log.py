"""What the processes of a run print, kept in its storage: it is still there when their machines are gone."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from raytrain.errors import RaytrainError
from raytrain.runs.layout import LOGS
from raytrain.runs.redact import redact
from raytrain.storage.base import Store

COPY_EVERY_S = 10.0
MAX_LOG_BYTES = 8 << 20  # the newest ones are kept
DRIVER = "driver"
_STREAMS = {"out": 1, "err": 2}
_NAME = re.compile(r"(driver|worker-\d+)-(\w+)\.(out|err|log)")


class LogCopies:
    """Copies of growing files in the storage of a run, without the secrets of this process's environment."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sizes: dict[str, int] = {}

    def copy(self, path: Path, name: str, start: int = 0) -> None:
        """Copy what ``path`` holds after ``start`` bytes to the log ``name``, if there is more than the last time.

        An object cannot grow, so that it is written again as a whole. Storage may be out of reach: the next copy has
        everything.
        """
        with suppress(RaytrainError, OSError):
            end = path.stat().st_size
            if end == self._sizes.get(name, start):
                return
            with path.open("rb") as file:
                file.seek(max(start, end - MAX_LOG_BYTES))
                text = file.read(end - file.tell()).decode(errors="replace")
            self.put(name, text)
            self._sizes[name] = end

    def put(self, name: str, text: str) -> None:
        """Write the whole log ``name``. Raises StorageError."""
        self._store.fail_fast().put(LOGS + name, redact(text).encode())


class CopyThread:
    """Calls ``copy`` every few seconds from :meth:`start` on, and once more when it is closed."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_closed, daemon=True, name="log-copies")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Copy the rest, and end the thread."""
        self._closed.set()
        self._thread.join()

    def _copy_until_closed(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(COPY_EVERY_S)
            self._copy()


class ProcessLog:
    """Copies to storage what this process prints while it is open, by Python or by C, and why it failed.

    Ray sends what a worker prints to files, which are read here. Without such files, as in a terminal, nothing is kept.
    """

    def __init__(self, store: Store, worker: int) -> None:
        self._copies = LogCopies(store)
        started = stamp()
        self._files = [
            (path, log_name(worker_log(worker), started, stream), path.stat().st_size)
            for stream, number in _STREAMS.items()
            if (path := _file_of(number)) is not None
        ]
        self._thread = CopyThread(self._copy)

    def __enter__(self) -> ProcessLog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if error is not None:
            traceback.print_exception(error)
        self._thread.close()

    def _copy(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for path, name, start in self._files:
            self._copies.copy(path, name, start)


@dataclass(frozen=True, order=True)
class StoredLog:
    """What one process printed in one start, to standard output (``out``) or standard error (``err``).

    What the driver printed and logged is in one (``log``).
    """

    started: str
    stream: str
    text: str


class LogReader:
    """Reads the logs of ``DRIVER`` or of a :func:`worker_log` again and again: only those that have changed."""

    def __init__(self, store: Store, whose: str) -> None:
        self.whose = whose
        self._store = store
        self._read: dict[str, tuple[str, StoredLog]] = {}

    def read(self) -> list[StoredLog]:
        """The logs, the earliest start first. Raises StorageError."""
        for found in self._store.list(LOGS):
            match = _NAME.fullmatch(found.path.rpartition("/")[2])
            if match is None or match[1] != self.whose:
                continue
            if self._read.get(found.path, ("",))[0] != found.etag:
                text = self._store.get(LOGS + match[0]).decode(errors="replace")
                self._read[found.path] = found.etag, StoredLog(match[2], match[3], text)
        return sorted(log for _, log in self._read.values())


def stamp() -> str:
    """The time in UTC, to the second, as part of a name."""
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")


def worker_log(rank: int) -> str:
    """Whose log it is, in the names of a worker's logs."""
    return f"worker-{rank}"


def log_name(whose: str, started: str, stream: str) -> str:
    """The name of a log; ``started`` tells the starts of a process apart, and sorts them."""
    return f"{whose}-{started}.{stream}"


def _file_of(number: int) -> Path | None:
    """The file that a descriptor of this process writes to; None if it is a terminal or a pipe."""
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(number).st_mode):
            return Path(os.readlink(f"/proc/self/fd/{number}"))
    return None
