"""What the driver of a run prints and logs, kept in the run's storage."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO, cast

from raytrain.errors import RaytrainError
from raytrain.runs.layout import CONFIG
from raytrain.runs.process_log import DRIVER, MAX_LOG_BYTES, CopyThread, LogCopies, log_name, stamp
from raytrain.storage.base import Store

_INFORMING = "raytrain.startup", "raytrain.runs.recorder"  # what they log is of level INFO
_MAY_PRINT = "", "raytrain", "ray"  # loggers whose handlers may write to standard error; Ray's pass nothing on


class DriverLog:
    """Copies to storage what this process prints and logs while it is open, by Python, and why it failed.

    A picture that is redrawn in a terminal is not kept. A run that has not begun gets no log.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copies = LogCopies(store)
        self._name = log_name(DRIVER, stamp(), "log")
        self._kept = _Tail()
        self._num_copied = 0
        self._begun = False
        self._copying = threading.Lock()
        self._thread = CopyThread(self.copy)
        self._opened = ExitStack()

    def __enter__(self) -> DriverLog:
        with ExitStack() as opened:
            for stream in ("stdout", "stderr"):
                opened.enter_context(_copied(stream, self._kept.add))
            for logger in _INFORMING:
                opened.enter_context(_informing(logger, self._kept.add))
            self._opened = opened.pop_all()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        self._opened.close()
        if error is not None:
            self._kept.add("".join(traceback.format_exception(error)))
        self._thread.close()

    def copy(self) -> None:
        """Copy what there is to storage, if there is more than the last time. Storage may be out of reach."""
        with self._copying, suppress(RaytrainError):
            self._begun = self._begun or self._store.fail_fast().exists(CONFIG)
            num_added, text = self._kept.read()
            if self._begun and num_added > self._num_copied:
                self._copies.put(self._name, text)
                self._num_copied = num_added


class _Tail:
    """The last ``MAX_LOG_BYTES`` of a text that grows. Safe to use from several threads."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._num_added = 0
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        with self._lock:
            self._data += text.encode(errors="replace")
            self._num_added += 1
            if len(self._data) > 2 * MAX_LOG_BYTES:
                del self._data[:-MAX_LOG_BYTES]

    def read(self) -> tuple[int, str]:
        """How many pieces were added so far, and the text."""
        with self._lock:
            return self._num_added, self._data[-MAX_LOG_BYTES:].decode(errors="replace")


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
def _informing(name: str, keep: Callable[[str], object]) -> Generator[None]:
    """Hand on what the logger with this name logs at INFO, which others see only if they would see it anyway."""
    logger, handler = logging.getLogger(name), _Records(keep)
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


class _Records(logging.Handler):
    """Hands on log records as lines."""

    def __init__(self, keep: Callable[[str], object]) -> None:
        super().__init__()
        self._keep = keep
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Called by ``logging``."""
        self._keep(self.format(record) + "\n")
