"""Exceptions that reach a user, each with one plain sentence.

The exceptions survive pickling: Ray carries them from a worker to the process that the user started.
"""

from __future__ import annotations

import linecache
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

_PACKAGE = os.path.join(Path(__file__).parent, "")  # with a slash at the end: raytrain_loops/ beside it is the user's


class RaytrainError(Exception):
    """Base of every error that raytrain raises on purpose; its text says all that a user needs to know.

    ``exit_code`` is the exit code of the command line: 2 for bad usage or input, 1 for a run that failed.

    Example::

        try:
            raytrain.train(config)
        except raytrain.RaytrainError as error:
            sys.exit(str(error))
    """

    exit_code = 1

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # the other arguments are for unpickling

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows for the error: the sentence, and the user's line that led to it.

        IPython calls this, if an exception has it, in place of showing 80 lines of traceback through raytrain's files.
        """
        # The user's line is the last one before raytrain's first. There is none if the error has not been raised.
        # Frames without a line are of code that Python has made, such as a dataclass's __init__.
        frames = traceback.extract_tb(self.__traceback__)
        frames = takewhile(lambda frame: not frame.filename.startswith(_PACKAGE), frames)
        callers = [frame for frame in frames if frame.line]
        users_lines = [f"{file_title(caller.filename)}, line {caller.lineno}: {caller.line}" for caller in callers[-1:]]
        return [f"{type(self).__name__}: {self}", *users_lines]


class UsageError(RaytrainError, ValueError):
    """A setting or an input is wrong; the sentence names the setting, the numbers and what to do.

    Example: ``TrainConfig(batch_size=0)`` raises it.
    """

    exit_code = 2


def current_folder() -> str:
    """Return the path of the current folder; raise UsageError if it has been removed.

    Relative paths have no meaning then, and neither Ray nor MKL, which torch computes with, can start.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("The current folder is gone; change to another one.") from None


class StorageError(RaytrainError):
    """Storage (a folder or a bucket) refuses access, is missing, or cannot be reached; the sentence says what to do.

    Example: ``raytrain.train(raytrain.recipes.cifar10(data="s3://no-such-bucket"))`` raises it.
    """

    exit_code = 2


class NoWholeCheckpoint(UsageError):
    """All checkpoints of a run that resumes are damaged, so another resume would fail in the same way."""


class ObjectArchived(StorageError):
    """An object is in an archive of the cloud, such as S3 Glacier, and must be restored before it is read."""


class OwnerChanged(RaytrainError):
    """Another process owns the run now, or the run is gone; the sentence says which. Nothing more was written."""


class OutOfMemory(RaytrainError):
    """A worker ran out of memory; a global batch may fit if it is divided into ``accumulate`` microbatches.

    With ``--accumulate auto``, the run starts again with this number.
    """

    def __init__(self, sentence: str, accumulate: int) -> None:
        super().__init__(sentence, accumulate)
        self.accumulate = accumulate


class LoopFailed(RaytrainError):
    """A run's loop raised an exception.

    ``restart_may_help``: the loop had completed at least one step in this attempt, so another attempt may succeed.
    """

    def __init__(self, sentence: str, restart_may_help: bool) -> None:
        super().__init__(sentence, restart_may_help)
        self.restart_may_help = restart_may_help


class TrainingFailed(RaytrainError):
    """A run failed; the sentence gives the cause and how to continue, ``summary`` what is known of the run.

    Example::

        try:
            raytrain.train(config)
        except raytrain.TrainingFailed as failed:
            print(failed, failed.summary["steps"])
    """

    def __init__(self, sentence: str, summary: dict[str, Any] | None = None) -> None:
        super().__init__(sentence, summary)
        self.summary = summary or {}


class CoordinatorLost(TrainingFailed):
    """The process that coordinates the run ``name`` died, and its workers with it; it can resume from a checkpoint."""

    def __init__(self, sentence: str, name: str, run_dir: str) -> None:
        super().__init__(sentence, {"name": name, "status": "failed", "run_dir": run_dir})
        self.args = (sentence, name, run_dir)  # unpickling calls the class with these
        self.name = name


def file_title(file: str) -> str:
    """Return what people call a file of code: its name, or ``cell In[5]`` for a cell of a notebook.

    Example: ``file_title("/home/me/my_loop.py") == "my_loop.py"``
    """
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # None while another thread imports it
    shell = get_shell and get_shell()
    if shell and (label_and_name := shell.compile.format_code_name(file)):
        return f"cell {label_and_name[1]}"
    # A worker got the lines of a cell with the cell's title, which stands last in their entry in the cache.
    title = linecache.cache.get(file, (file,))[-1]
    return Path(title if isinstance(title, str) else file).name


def option_name(name: str) -> str:
    """Return the field ``name`` of TrainConfig in the form of the command line, without the dashes before it.

    Example: ``option_name("batch_size") == "batch-size"``
    """
    return name.replace("_", "-")


def flag(name: str) -> str:
    """Return the flag of the field ``name`` of TrainConfig.

    Example: ``flag("batch_size") == "--batch-size"``
    """
    return f"--{option_name(name)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` with up to three ``known`` names that are similar to ``name``; empty if none is.

    Example: ``did_you_mean("trian", ["train", "stop"]) == " (did you mean train?)"``
    """
    similar = get_close_matches(name, dict.fromkeys(known), cutoff=0.7)
    return f" (did you mean {' or '.join(similar)}?)" if similar else ""


def shell_command(*words: str, storage: str = "./runs", program: str = "raytrain", extra: str | None = None) -> str:
    """Return a command line as one types it on this machine.

    If this process runs under uv, which sets the variable UV, the line begins with ``uv run``. ``extra`` names an extra
    of raytrain's package that the command needs, such as ``onnx``: uv then installs it. ``storage`` is left out if it
    is the default.

    Example:
        >>> shell_command("show", "digits", storage="s3://bucket/runs")
        'raytrain show digits --storage s3://bucket/runs'
    """
    in_storage = [] if storage == "./runs" else ["--storage", storage]
    uv = ["uv", "run", *(("--extra", extra) if extra else ())] if "UV" in os.environ else []
    return shlex.join([*uv, program, *words, *in_storage])


def format_dollars(dollars: float) -> str:
    """Return an amount with cents, below a dollar with four digits after the point.

    Example:
        >>> format_dollars(1234.5), format_dollars(0.0123)
        ('$1,234.50', '$0.0123')
    """
    return f"${dollars:,.2f}" if dollars >= 1 else f"${dollars:.4f}"


def format_count(number: float, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> format_count(1, "worker"), format_count(3, "epoch"), format_count(1200, "class"), format_count(0.5, "CPU")
    ('1 worker', '3 epochs', '1,200 classes', '0.5 CPUs')
    """
    text = f"{number:g}" if isinstance(number, float) else f"{number:,}"
    # The nouns in our sentences end in "ss" (class), "tch" (batch), or take an "s".
    if number == 1:
        return f"{text} {noun}"
    return f"{text} {noun}{'es' if noun.endswith(('ss', 'tch')) else 's'}"


def some_of(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are.

    >>> some_of("abcde")
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
