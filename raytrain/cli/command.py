"""Parts that commands share: their result, common arguments, when they were started, and a question to a person."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

if TYPE_CHECKING:
    from rich.console import RenderableType


def process_started_at() -> float:
    """Return when this process was started, in seconds of ``time.monotonic()``; now if the system does not say."""
    with suppress(OSError):  # there is no /proc on macOS
        # The 20th field after the name counts the clock ticks from the machine's start to that of the process.
        start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - age_s
    return time.monotonic()


@dataclass(frozen=True)
class CommandResult:
    """Result of a command: ``text`` for a person, ``document`` for ``--json``, and the exit code of the process.

    If ``text`` is None, the document is shown as a table. An empty ``text`` prints nothing.
    """

    text: RenderableType | None
    document: dict[str, Any]
    exit_code: int = 0


Flag = FlagCreatePairsOff[bool]  # --flag, without a --no-flag
Address = Annotated[str | None, arg(help="Ray cluster to use; by default RAY_ADDRESS, else one on this machine.")]
RunName = Annotated[Positional[str], arg(help="Name of the run.")]
Storage = Annotated[str, arg(help="Where runs are stored: a folder or a URL (s3://…, gs://…, az://…).")]
Trust = Annotated[Flag, arg(help="Run the network also if it is code of whoever wrote the run.")]


def ask(question: str) -> str:
    """Return what the person at the terminal answers, in small letters; empty text for Ctrl-D.

    The question is on standard error, since standard output may be a file that gets the result of the command.

    Example: ``ask("Stop the run? [y/N] ") == "y"``
    """
    print(question, end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower()
    except EOFError:
        print(file=sys.stderr)  # what is printed next begins a line
        return ""
