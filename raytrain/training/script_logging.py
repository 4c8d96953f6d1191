"""Sets up logging on the workers as the script that started the run has set it up, so that its loop logs there, too.

A script calls ``logging.basicConfig`` or adds a handler to a logger. The workers of its run are processes of their own
that do not execute it, so that without these settings, a loop's lines of level INFO would be lost. The workers get the
levels of the loggers, and the level, format and stream of each handler that prints.

Several processes must not write to one file, and some workers may be on other machines. So a worker sends its records
for a handler that writes to a file to the driver, whose own handler writes them: :func:`write_record`. Handlers that
write elsewhere, such as to a server, are left out.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging.handlers import QueueHandler
from typing import Any, NamedTuple

_LIBRARIES = frozenset(
    [
        *("aiobotocore", "aiohttp", "asyncio", "azure", "boto3", "botocore", "filelock", "fsspec", "google"),
        *("httpcore", "httpx", "huggingface_hub", "matplotlib", "PIL", "ray", "raytrain", "s3fs", "s3transfer"),
        *("torch", "urllib3"),
    ]
)
"""First parts of the names of loggers of libraries that the run itself uses, whose settings are left alone."""


@dataclass(frozen=True)
class PrintingHandler:
    """Level, formatter and stream, ``stdout`` or ``stderr``, of a handler that prints."""

    level: int
    formatter: logging.Formatter | None
    stream: str


@dataclass(frozen=True)
class LoggerSettings:
    """Settings of one logger that are sent to the workers.

    ``file_level`` is the lowest level of its handlers that write to files; None if there are none.
    """

    level: int
    propagate: bool
    handlers: tuple[PrintingHandler, ...]
    file_level: int | None = None


class LoggedRecord(NamedTuple):
    """A record that a worker has logged for the files of the driver's logger ``logger``.

    ``attributes`` are those of the ``LogRecord`` that are texts, numbers or None.
    """

    rank: int
    logger: str
    attributes: dict[str, Any]


def logging_here() -> dict[str, LoggerSettings]:
    """Return the settings of the loggers that somebody has set up in this process, by name; the root's name is empty.

    Loggers of libraries that the run itself uses are left out.

    Example: ``{"": LoggerSettings(20, True, (PrintingHandler(0, formatter, "stderr"),))}`` after
    ``logging.basicConfig(level=logging.INFO)``
    """
    # The manager also has placeholders, for the parents of loggers that nobody has asked for.
    loggers = {"": logging.getLogger()}
    for name, logger in [*logging.Logger.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and name.partition(".")[0] not in _LIBRARIES:
            loggers[name] = logger
    settings: dict[str, LoggerSettings] = {}
    for name, logger in loggers.items():
        printing = tuple(filter(None, map(_printing_settings, logger.handlers)))
        files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
        file_level = min((handler.level for handler in files), default=None)
        unset_level = logging.NOTSET if name else logging.WARNING
        if printing or files or logger.level != unset_level or not logger.propagate:
            settings[name] = LoggerSettings(logger.level, logger.propagate, printing, file_level)
    return settings


def log_as(settings: Mapping[str, LoggerSettings], rank: int, send: Callable[[LoggedRecord], object]) -> None:
    """Set up the loggers of this process, worker ``rank``, by ``settings`` of :func:`logging_here` in the driver.

    ``send`` passes a record on to the driver. A logger that has handlers already is left as it is: the file of the loop
    has set it up here, too. Ray's own handlers are removed.

    Example: ``log_as(settings, rank=1, send=reporter.logged)``
    """
    # Ray prints all records of level INFO, also those of libraries, and basicConfig in a loop would change nothing.
    root = logging.getLogger()
    if of_ray := [handler for handler in root.handlers if type(handler).__module__.startswith("ray.")]:
        root.setLevel(logging.WARNING)
    for handler in of_ray:
        root.removeHandler(handler)

    for name, logger_settings in settings.items():
        logger = logging.getLogger(name)
        if logger.handlers:
            continue
        logger.setLevel(logger_settings.level)
        logger.propagate = logger_settings.propagate
        for printing in logger_settings.handlers:
            handler = logging.StreamHandler(sys.stdout if printing.stream == "stdout" else sys.stderr)
            handler.setLevel(printing.level)
            handler.setFormatter(printing.formatter)
            handler.addFilter(_is_wanted)
            logger.addHandler(handler)
        if logger_settings.file_level is not None:
            sending = _SendingHandler(name, rank, send)
            sending.setLevel(logger_settings.file_level)
            sending.addFilter(_is_wanted)
            logger.addHandler(sending)


class _SendingHandler(QueueHandler):
    """Sends records to the driver, without their arguments and exceptions, which are in the message by then."""

    def __init__(self, logger: str, rank: int, send: Callable[[LoggedRecord], object]) -> None:
        super().__init__(None)  # pyright: ignore[reportArgumentType] ; there is no queue: see enqueue
        self._logger, self._rank, self._send = logger, rank, send
        self._process = os.getpid()

    def enqueue(self, record: logging.LogRecord) -> None:
        # A process that the loop has forked shares this one's connection to the driver, and must not use it.
        if os.getpid() != self._process:
            print(record.getMessage(), file=sys.stderr)
            return
        plain = {name: value for name, value in vars(record).items() if isinstance(value, str | int | float | None)}
        self._send(LoggedRecord(self._rank, self._logger, plain | {"processName": f"worker{self._rank}"}))


def write_record(logged: LoggedRecord) -> None:
    """Have the handlers of the driver that write to files write a record of a worker's, if it has their level."""
    record = logging.makeLogRecord(logged.attributes)
    for handler in logging.getLogger(logged.logger).handlers:
        if isinstance(handler, logging.FileHandler) and record.levelno >= handler.level:
            handler.handle(record)


def _printing_settings(handler: logging.Handler) -> PrintingHandler | None:
    """Return the settings of ``handler``; None if it does not print, but writes to a file or keeps its records."""
    prints = isinstance(handler, logging.StreamHandler) or hasattr(handler, "console")  # rich's handler has a console
    stream = getattr(handler, "stream", None)
    if not prints or isinstance(handler, logging.FileHandler) or isinstance(stream, io.StringIO):
        return None
    # A formatter of another class may hold anything, such as colours, so its records get a plain format.
    formatter = handler.formatter
    if formatter is not None and type(formatter) is not logging.Formatter:
        formatter = logging.Formatter(logging.BASIC_FORMAT)
    # The name is compared, too (<stdout>, or stdout in a notebook), because the run's view may have wrapped the stream.
    is_out = stream is sys.stdout or "stdout" in str(getattr(stream, "name", ""))
    return PrintingHandler(handler.level, formatter, "stdout" if is_out else "stderr")


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return False for a record below WARNING of a library that works for the run."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in _LIBRARIES
