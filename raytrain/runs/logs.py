"""Logs of a run: what its driver and its workers print, copied to storage while it trains."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from raytrain.errors import RaytrainError
from raytrain.runs.documents import CONFIG, LOGS
from raytrain.runs.redact import redact
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

STARTUP = logging.getLogger("raytrain.startup")

COPY_EVERY_S = 10.0
MAX_LOG_BYTES = 8 << 20  # the newest ones are kept
DRIVER = "driver"
_STREAMS = {"out": 1, "err": 2}
_NAME = re.compile(r"(driver|worker-\d+)-(\w+)\.(out|err|log)")
_INFORMING = "raytrain.startup", "raytrain.monitor.recorder", "raytrain.ray"  # what they log is of level INFO
_MAY_PRINT = "", "raytrain", "ray"  # loggers whose handlers may write to standard error; Ray's pass nothing on


class LogFile(NamedTuple):
    """A growing file of this machine, the name of its copy, and how many bytes of it were there before."""

    path: Path
    name: str
    start: int = 0


class LogCopies:
    """Copies growing files into the storage of a run, once it has ``begun``, without secrets, every few seconds."""

    def __init__(self, store: Store, *, begun: bool = False) -> None:
        self._store = store
        self._waits_for_run = begun
        self._sizes: dict[str, int] = {}
        self._copying = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._copy_until_closed, daemon=True, name="log-copies")

    def files(self) -> Iterable[LogFile]:
        """The files at present."""
        raise NotImplementedError

    def __enter__(self) -> LogCopies:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        """Copy the rest, and end the thread."""
        self._closed.set()
        self._thread.join()

    def copy(self) -> None:
        """Copy each file that has grown since the last time; an object is written again as a whole."""
        with self._copying, suppress(RaytrainError, OSError):
            self._waits_for_run = self._waits_for_run and not self._store.fail_fast().exists(CONFIG)
            for file in () if self._waits_for_run else self.files():
                self._copy(*file)

    def _copy(self, path: Path, name: str, start: int) -> None:
        end = path.stat().st_size
        if end == self._sizes.get(name, start):
            return
        with path.open("rb") as file:
            file.seek(max(start, end - MAX_LOG_BYTES))
            text = file.read(end - file.tell()).decode(errors="replace")
        self._store.fail_fast().put(LOGS + name, redact(text).encode())
        self._sizes[name] = end

    def _copy_until_closed(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(COPY_EVERY_S)
            self.copy()


class ProcessLog(LogCopies):
    """What this process prints while this is open, by Python or C, in the files of Ray, and why it failed."""

    def __init__(self, store: Store, worker: int) -> None:
        super().__init__(store)
        started = stamp()
        self._files = [
            LogFile(path, log_name(worker_log(worker), started, stream), path.stat().st_size)
            for stream, number in _STREAMS.items()
            if (path := _file_of(number)) is not None
        ]

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        if error is not None:
            traceback.print_exception(error)
        super().__exit__(kind, error, *trace)

    def files(self) -> Iterable[LogFile]:
        sys.stdout.flush()
        sys.stderr.flush()
        return self._files


class WorkerLogs(LogCopies):
    """The files that torch's elastic agent writes below ``folder``, for each start and worker."""

    def __init__(self, store: Store, folder: Path) -> None:
        super().__init__(store, begun=True)
        self._folder = folder
        self._session = stamp()

    def files(self) -> Iterable[LogFile]:
        for path in self._folder.glob("*/attempt_*/*/std*.log"):
            attempt, rank = path.parts[-3].removeprefix("attempt_"), int(path.parts[-2])
            started, stream = f"{self._session}a{attempt}", path.stem.removeprefix("std")
            yield LogFile(path, log_name(worker_log(rank), started, stream))


class DriverLog(LogCopies):
    """What this process prints and logs while this is open, by Python, but no pictures; and why it failed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, begun=True)
        self._name = log_name(DRIVER, stamp(), "log")
        self._writing = threading.Lock()

    def __enter__(self) -> LogCopies:
        with ExitStack() as opened:
            self._path = opened.enter_context(TemporaryFolder()) / "log"
            self._file = opened.enter_context(self._path.open("w", encoding="utf-8", errors="replace"))
            self._kept = opened.pop_all()
            for stream in ("stdout", "stderr"):
                opened.enter_context(_copied(stream, self.write))
            for logger in _INFORMING:
                opened.enter_context(_informing(logger, self))
            self._opened = opened.pop_all()
        return super().__enter__()

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        self._opened.close()
        if error is not None:
            self.write("".join(traceback.format_exception(error)))
        super().__exit__(kind, error, *trace)
        self._kept.close()

    def files(self) -> Iterable[LogFile]:
        return [LogFile(self._path, self._name)]

    def write(self, text: str) -> None:
        """Add to the log, as to a stream."""
        with self._writing:
            self._file.write(text)
            self._file.flush()


class _Tee:
    """A stream that also hands on what is written to it. In all else it is the ``stream`` itself."""

    def __init__(self, stream: TextIO, keep: Callable[[str], object]) -> None:
        self._stream = stream
        self._keep = keep

    def write(self, text: str) -> int:
        self._keep(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        # As while rich redraws a part of the terminal: it takes the stream below its own, so that the picture is not
        # written here.
        return getattr(self._stream, name)


@contextmanager
def _copied(name: str, keep: Callable[[str], object]) -> Generator[None]:
    """Hand on what is written to the stream of :mod:`sys` with this name, also by handlers of loggers."""
    stream: TextIO = getattr(sys, name)
    tee = cast(TextIO, _Tee(stream, keep))
    setattr(sys, name, tee)
    _redirect_handlers(stream, tee)
    try:
        yield
    finally:
        _redirect_handlers(tee, stream)
        if getattr(sys, name) is tee:  # not so if somebody has replaced it since
            setattr(sys, name, stream)


def _redirect_handlers(before: TextIO, after: TextIO) -> None:
    for handler in [each for name in _MAY_PRINT for each in logging.getLogger(name).handlers]:
        if getattr(handler, "stream", None) is before:
            cast("logging.StreamHandler[TextIO]", handler).setStream(after)


@contextmanager
def _informing(name: str, log: DriverLog) -> Generator[None]:
    """Hand on what the logger with this name logs at INFO, which others see only if they would see it anyway."""
    logger, handler = logging.getLogger(name), logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.propagate = propagate and logger.isEnabledFor(logging.INFO)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@dataclass(frozen=True, order=True)
class StoredLog:
    """What one process printed in one start, as ``out`` and ``err``; what the driver printed and logged is ``log``."""

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
