"""Logs of a run: what its processes print, shown at once and copied to storage.

Each process writes to a file of its machine, which Ray, torch's elastic agent or a :class:`DriverLog` has opened. A
thread reads what the files have grown by, several times a second, and passes on whole lines of workers to the driver;
every few seconds it copies the files to storage. Both are without secrets. An attempt has logs of its own, whose names
begin with the process and sort by time: ``worker-0-20250131T120000.err``.

The thread must not hold up training, which shares Python's lock with it. So it reads only what is new, in pieces that
take milliseconds each, and copies only the beginning of a very long line.
"""

from __future__ import annotations

import codecs
import logging
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO, cast

from raytrain.errors import RaytrainError
from raytrain.runs.documents import CONFIG, LOGS
from raytrain.runs.redact import printable, redact
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

if TYPE_CHECKING:
    from typing_extensions import Self

STARTUP = logging.getLogger("raytrain.startup")
EVENTS = logging.getLogger("raytrain.monitor.document_writer")  # of runs

COPY_EVERY_S = 10.0  # to storage
READ_EVERY_S = 0.25  # if lines are shown
MAX_SHOWN_LINES = 200  # of a file, each time that it is read; the copy in storage has all lines
MAX_LOG_BYTES = 8 << 20  # of a log in storage: the newest ones
MAX_LINE = 16 << 10  # characters of a line that are copied
_LONGEST_SECRET = 16 << 10  # characters; a private key may go over several lines
_PIECE_BYTES = 128 << 10  # read and redacted at once
_LINE_END = re.compile(r"[\r\n]")  # a progress bar ends its lines by \r alone
DRIVER = "driver"
_STREAMS = {"out": 1, "err": 2}
_NAME = re.compile(r"(driver|worker-\d+)-(\w+)\.(out|err|log)")
_INFO_LOGGERS = STARTUP.name, EVENTS.name, "raytrain.ray"  # loggers whose INFO is in driver logs
_PRINTING_LOGGERS = "", "raytrain", "ray"  # loggers whose handlers may write to standard error; Ray's pass nothing on


class LogFile(NamedTuple):
    """A growing file of this machine, the name of its copy, and the byte at which this process's part of it starts."""

    path: Path
    name: str
    start: int = 0


class PrintedLine(NamedTuple):
    """A line that a worker has printed to ``stream``, ``out`` or ``err``, without line end and secrets."""

    rank: int
    stream: str
    text: str


ShowLines = Callable[[Sequence[PrintedLine]], None]
"""Takes new lines of workers, to show them."""


def print_line(line: PrintedLine, trial: str = "") -> None:
    """Print a line of a worker's, behind its number and the name of its ``trial``, if any: ``[worker0]:step 1``.

    It goes to the same stream to which the worker has printed it. Characters that this stream cannot encode become "?".
    """
    stream = sys.stdout if line.stream == "out" else sys.stderr
    encoding = getattr(stream, "encoding", None) or "utf-8"  # scripts replace streams by objects that can only write
    text = line.text.encode(encoding, "replace").decode(encoding)
    print(f"[{trial}worker{line.rank}]:{text}", file=stream)
    with suppress(AttributeError):
        stream.flush()


class LogText:
    """The text of a growing log as it is stored: without secrets, long lines cut, and only the newest 8 MiB.

    A secret may arrive in two parts, or go over several lines. So the latest text is redacted anew each time; earlier
    text is settled: it has been redacted for good.

    Example:
        >>> log = LogText()
        >>> log.add("step 1\\nstep")
        ['step 1']
        >>> log.content()
        b'step 1\\nstep'
    """

    def __init__(self) -> None:
        self._settled = bytearray()  # redacted and encoded, and not looked at again
        self._latest = ""  # the whole lines after that, as they were written, but none of them too long
        self._line = ""  # the beginning of the line that has not ended yet
        self._line_length = 0  # characters of it, including those that were left out
        self._written_over = ""  # the text of this line before the last carriage return

    def add(self, text: str) -> list[str]:
        """Add the text written since the last call; return the lines that have ended, not yet redacted.

        A line that is written over again and again, such as a progress bar, is returned in its last state.
        """
        start, latest, ended = 0, [self._latest], list[str]()
        for end in _LINE_END.finditer(text):
            self._extend_line(text[start : end.start()])
            line = self.line()
            latest += line, end[0]
            # Only a line feed ends a line; after a carriage return, it is written over.
            if end[0] == "\n":
                ended.append(line or self._written_over)
            self._written_over = "" if end[0] == "\n" else line
            self._line, self._line_length, start = "", 0, end.end()
        self._extend_line(text[start:])
        self._latest = "".join(latest)
        self._settle()
        return ended

    def content(self) -> bytes:
        """Return the text for storage, redacted and encoded: all of it, or of a long one the last 8 MiB."""
        return (bytes(self._settled) + redact(self._latest + self.line()).encode(errors="replace"))[-MAX_LOG_BYTES:]

    def _extend_line(self, text: str) -> None:
        """Add ``text`` to the line that is being written, of which a bounded part is kept."""
        self._line += text[: MAX_LINE + _LONGEST_SECRET - len(self._line)]
        self._line_length += len(text)

    def line(self) -> str:
        """Return the unfinished line, not yet redacted; of a long one, the redacted beginning and its length."""
        if self._line_length <= MAX_LINE + _LONGEST_SECRET:
            return self._line
        # Redact first, then leave out the end, which may hold the first part of a secret that was cut.
        beginning = redact(self._line)[:-_LONGEST_SECRET]
        return f"{beginning}… (of a line of {self._line_length:,} characters, at most {MAX_LINE:,} are copied)"

    def _settle(self) -> None:
        """Redact all but the latest text for good, unless a secret crosses the border between both."""
        # The border is the last line end that leaves as many characters after it as the longest secret has.
        border = max(self._latest.rfind(end, 0, -_LONGEST_SECRET) for end in "\r\n") + 1
        if not border:
            return
        before, after = self._latest[:border], self._latest[border:]
        near = before[-_LONGEST_SECRET:]
        # A secret crosses the border if redacting both sides together gives another text than redacting each.
        if redact(near + after) == redact(near) + redact(after):
            self._settled += redact(before).encode(errors="replace")
            self._latest = after
        # Then wait for more text, but not for ever: what is redacted anew each time must not grow without limit.
        elif len(self._latest) > 2 * _PIECE_BYTES:
            self._settled += redact(self._latest).encode(errors="replace")
            self._latest = ""
        del self._settled[:-MAX_LOG_BYTES]


@dataclass
class _Copy:
    """State of the copy of a file: ``text`` has its first ``end`` bytes, and storage has them unless ``is_new``."""

    end: int
    text: LogText = field(default_factory=LogText)
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    is_new: bool = False


class LogCopies:
    """Reads growing files, shows their lines, and copies them into the storage of a run every few seconds.

    A subclass says which :meth:`files` these are. With ``waits_for_run``, nothing is copied before the run's options
    are in storage, so that a run which never begins leaves no logs. ``show`` is called with new lines, in the thread
    that reads or in that of :meth:`show_rest`. Without a ``store``, the lines are only shown.
    """

    def __init__(self, store: Store | None, *, waits_for_run: bool = False, show: ShowLines | None = None) -> None:
        self._store = store
        self._waits_for_run = waits_for_run
        self._show = show
        self._copies: dict[str, _Copy] = {}  # by name
        self._reading = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow_until_closed, daemon=True, name="log-copies")

    def files(self) -> Iterable[LogFile]:
        """Return the log files that exist now."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        """Copy the rest, and end the thread. Nothing is raised if storage is out of reach."""
        self._closed.set()
        self._thread.join()

    def read(self) -> None:
        """Read the new text of each file, and show its whole lines."""
        with self._reading, suppress(OSError):
            for path, name, start in self.files():
                copy, end = self._copies.setdefault(name, _Copy(start)), path.stat().st_size
                # If the file was replaced by a shorter one, or has grown too much, begin anew, with its last part.
                if not copy.end <= end <= copy.end + MAX_LOG_BYTES:
                    copy = self._copies[name] = _Copy(max(start, end - MAX_LOG_BYTES))
                if copy.end == end:
                    continue
                lines: list[str] = []
                with path.open("rb") as file:
                    file.seek(copy.end)
                    while piece := file.read(min(_PIECE_BYTES, end - copy.end)):
                        lines += copy.text.add(copy.decoder.decode(piece))
                        copy.end, copy.is_new = copy.end + len(piece), True
                self._show_lines(name, lines)

    def show_rest(self) -> None:
        """Show all that the files hold by now, unfinished lines, too; nothing is shown any more after that."""
        self.read()
        with self._reading:
            for name, copy in self._copies.items():
                self._show_lines(name, [copy.text.line()])
            self._show = None

    def _show_lines(self, name: str, lines: list[str]) -> None:
        """Show ``lines`` of the worker's log ``name``, without secrets and empty lines; of very many, the last ones."""
        lines = [line for line in lines if line.strip()]
        if self._show is None or not lines:
            return
        _, rank, time_and_stream = name.split("-")  # worker-RANK-TIME.STREAM, see log_name
        stream = time_and_stream.rpartition(".")[2]
        if (num_left_out := len(lines) - MAX_SHOWN_LINES) > 0:
            note = f"… {num_left_out:,} lines are left out here"
            if self._store is not None:
                note += f"; `raytrain logs RUN --worker {rank}` has them"
            lines = [note, *lines[num_left_out:]]
        # Redact all lines together, because a secret may go over several.
        shown = printable(redact("\n".join(lines))).split("\n")
        self._show([PrintedLine(int(rank), stream, line) for line in shown])

    def copy(self) -> None:
        """Read the files, and copy each one with new text to storage, where the object is replaced as a whole.

        If storage is out of reach, nothing is raised, and the next call copies the text.
        """
        self.read()
        if self._store is None:
            return
        with self._reading, suppress(RaytrainError, OSError):
            # Storage that hangs must not hold up the end of a run: all requests give up within seconds.
            self._waits_for_run = self._waits_for_run and not self._store.fail_fast().exists(CONFIG)
            if self._waits_for_run:
                return
            for name, copy in self._copies.items():
                if copy.is_new:
                    self._store.fail_fast().put(LOGS + name, copy.text.content())
                    copy.is_new = False

    def _follow_until_closed(self) -> None:
        """Run in a thread: read the files several times a second, and copy them every few seconds."""
        interval_s = COPY_EVERY_S if self._show is None else READ_EVERY_S
        next_copy_s = time.monotonic() + COPY_EVERY_S
        while not self._closed.wait(interval_s):
            if time.monotonic() < next_copy_s:
                self.read()
                continue
            self.copy()
            next_copy_s = time.monotonic() + COPY_EVERY_S
        self.copy()


class ProcessLog(LogCopies):
    """The log of a process of Ray: what it prints while the log is open, and the exception that ends it.

    Ray has redirected the output of the process to files, and these are copied, so what libraries in C print is in the
    log, too. Output that goes to a terminal or a pipe is not copied. ``worker`` is the rank of the process.
    """

    def __init__(self, store: Store | None, worker: int, show: ShowLines | None = None) -> None:
        super().__init__(store, show=show)
        started = stamp()
        self._files: list[LogFile] = []
        for stream, descriptor in _STREAMS.items():
            with suppress(OSError):
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                    name = log_name(worker_log(worker), started, stream)
                    self._files.append(LogFile(path, name, start=path.stat().st_size))

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        self.show_rest()
        if error is not None:
            traceback.print_exception(error)  # for the log: the driver says in a sentence why the run ends
        super().__exit__(kind, error, *trace)

    def files(self) -> Iterable[LogFile]:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the user's code may have closed or replaced it
                stream.flush()
        return self._files


class WorkerLogs(LogCopies):
    """The logs of workers of torch's elastic agent, which makes a file below ``folder`` for each attempt and worker."""

    def __init__(self, store: Store, folder: Path, show: ShowLines) -> None:
        super().__init__(store, waits_for_run=True, show=show)
        self._folder = folder
        self._session = stamp()

    def files(self) -> Iterable[LogFile]:
        # FOLDER/RUN/attempt_0/RANK/stdout.log
        for path in self._folder.glob("*/attempt_*/*/std*.log"):
            attempt, rank = path.parts[-3].removeprefix("attempt_"), int(path.parts[-2])
            started, stream = f"{self._session}a{attempt}", path.stem.removeprefix("std")
            yield LogFile(path, log_name(worker_log(rank), started, stream))


class DriverLog(LogCopies):
    """The log of the driver: all that Python prints and logs in this process while the log is open, and its error.

    The picture of the run, which rich redraws in the terminal, is not written.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, waits_for_run=True)
        self._name = log_name(DRIVER, stamp(), "log")
        # In the middle of a write, Python may call a signal handler or a finalizer, which may print. So a thread may
        # take the lock twice, and the file has no buffer, which would refuse the second write.
        self._writing = threading.RLock()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._path = opened.enter_context(TemporaryFolder()) / "log"
            self._file = opened.enter_context(self._path.open("wb", buffering=0))
            self._kept = opened.pop_all()  # until the last copy
            for stream in ("stdout", "stderr"):
                opened.enter_context(_copying_stream(stream, self.write))
            for logger in _INFO_LOGGERS:
                opened.enter_context(_logging_info(logger, self))
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
        """Add to the log, as a stream does, until the log has ended.

        Libraries keep the stream that :mod:`sys` had when they were imported: colorama, which Ray brings, writes to it
        once more when the process ends.
        """
        # The disk of the temporary folder may be full. Whatever prints must not fail because of that.
        with self._writing, suppress(OSError):
            if not self._file.closed:
                self._file.write(text.encode(errors="replace"))


class _Tee:
    """A stream that passes text written to it on to ``keep`` as well; in everything else it is ``stream`` itself.

    The other attributes cannot be written out: those of a terminal, of pytest's and of a notebook's streams differ, and
    libraries ask for them by name. rich writes to the stream below this one while it redraws a part of the terminal.
    """

    def __init__(self, stream: TextIO, keep: Callable[[str], object]) -> None:
        self._stream = stream
        self._keep = keep

    def write(self, text: str) -> int:
        self._keep(text)
        return self._stream.write(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def _copying_stream(name: str, keep: Callable[[str], object]) -> Generator[None]:
    """Pass what is written to the stream ``name`` of :mod:`sys`, directly or by loggers' handlers, also to ``keep``."""
    stream: TextIO = getattr(sys, name)
    tee = cast(TextIO, _Tee(stream, keep))
    setattr(sys, name, tee)
    redirect_handlers(stream, tee)
    try:
        yield
    finally:
        redirect_handlers(tee, stream)
        if getattr(sys, name) is tee:  # somebody may have replaced it meanwhile
            setattr(sys, name, stream)


def redirect_handlers(before: TextIO, after: TextIO) -> None:
    """Make the handlers of loggers that write to the stream ``before`` write to ``after``.

    The loggers are raytrain's, Ray's and the root logger.
    """
    for handler in [handler for name in _PRINTING_LOGGERS for handler in logging.getLogger(name).handlers]:
        if getattr(handler, "stream", None) is before:
            cast("logging.StreamHandler[TextIO]", handler).setStream(after)


@contextmanager
def _logging_info(name: str, log: DriverLog) -> Generator[None]:
    """In this context, write INFO records of the logger ``name`` to ``log``, and to no other handler because of it."""
    logger, handler = logging.getLogger(name), logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # At level INFO, the logger would also pass such records on to its parents' handlers, which do not filter them.
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
    """The text that a process wrote in one attempt to a stream: ``out``, ``err``, or ``log`` for all of a driver's."""

    started: str
    stream: str
    text: str


class LogReader:
    """Reads the logs of a process repeatedly, each time only those that have changed.

    ``process`` is ``DRIVER`` or a :func:`worker_log`.

    Example:
        >>> for log in LogReader(run_store("./runs", "digits"), worker_log(0)).read():
        ...     print(log.text)
    """

    def __init__(self, store: Store, process: str) -> None:
        self.process = process
        self._store = store
        self._read: dict[str, tuple[str, StoredLog]] = {}  # ETag and log, by path

    def read(self) -> list[StoredLog]:
        """Return the logs, those of the earliest attempt first. Raises StorageError if storage is out of reach."""
        for stored in self._store.list(LOGS):
            match = _NAME.fullmatch(stored.path.rpartition("/")[2])
            if match is None or match[1] != self.process:
                continue
            if self._read.get(stored.path, ("",))[0] != stored.etag:
                text = self._store.get(LOGS + match[0]).decode(errors="replace")
                self._read[stored.path] = stored.etag, StoredLog(match[2], match[3], text)
        return sorted(log for _, log in self._read.values())


def stamp() -> str:
    """Return the time in UTC, to the second, as part of a name: ``20250131T120000``."""
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")


def worker_log(rank: int) -> str:
    """Return the name of a worker's process in the names of its logs."""
    return f"worker-{rank}"


def log_name(process: str, started: str, stream: str) -> str:
    """Return the name of a log: ``driver-20250131T120000.log``, or ``worker-0-20250131T120000.err``.

    ``started`` tells the attempts of a process apart, and sorts them.
    """
    return f"{process}-{started}.{stream}"
