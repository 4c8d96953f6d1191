"""Sets up logging on the workers as the script that started the run has set it up, so that its loop logs there, too.

A script calls ``logging.basicConfig`` or adds a handler to a logger. The workers of its run are processes of their own
that do not execute it, so that without these settings, a loop's lines of level INFO would be lost. The workers get the
levels of the loggers, and the level, format and stream of each handler that prints. Handlers that write elsewhere, such
as to a file, are left out, because several processes must not write to one file.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_LIBRARIES = frozenset(
    {
        *(
            "aiobotocore",
            "aiohttp",
            "asyncio",
            "azure",
            "boto3",
            "botocore",
            "filelock",
            "fsspec",
            "google",
            "httpcore",
        ),
        *("httpx", "huggingface_hub", "matplotlib", "PIL", "ray", "raytrain", "s3fs", "s3transfer", "torch", "urllib3"),
    }
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
    """Settings of one logger that are sent to the workers."""

    level: int
    propagate: bool
    handlers: tuple[PrintingHandler, ...]


def logging_here() -> dict[str, LoggerSettings]:
    """Return the settings of the loggers that somebody has set up in this process, by name; the root's name is empty.

    Example: ``{"": LoggerSettings(20, True, (PrintingHandler(0, formatter, "stderr"),))}`` after
    ``logging.basicConfig(level=logging.INFO)``
    """
    named = [*logging.Logger.manager.loggerDict.items()]
    loggers = {"": logging.getLogger(), **{name: found for name, found in named if isinstance(found, logging.Logger)}}
    settings: dict[str, LoggerSettings] = {}
    for name, logger in loggers.items():
        if name.partition(".")[0] in _LIBRARIES:
            continue
        printing = tuple(found for handler in logger.handlers if (found := _printing(handler)) is not None)
        unset_level = logging.NOTSET if name else logging.WARNING
        if printing or logger.level != unset_level or not logger.propagate:
            settings[name] = LoggerSettings(logger.level, logger.propagate, printing)
    return settings


def log_as(settings: Mapping[str, LoggerSettings]) -> None:
    """Set up the loggers of this process, a worker, by ``settings`` of :func:`logging_here` in the driver.

    A logger that has handlers already keeps them: the file of the loop has set it up here, too.
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


def _printing(handler: logging.Handler) -> PrintingHandler | None:
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
