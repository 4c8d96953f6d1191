"""The debugger that ``breakpoint()`` in a loop opens: in the terminal of the command, for a single local worker.

A worker has no terminal: its output goes into a file, and its input is empty. So it opens the terminal of the command
by its name, and the view there pauses. On several workers, on Ray and in a notebook, an error says what
``breakpoint()`` needs.
"""

from __future__ import annotations

import os
import pdb
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytrain.config.user_code import users_line
from raytrain.errors import UsageError

_PYTHONS_OWN = "", "pdb.set_trace"  # values of PYTHONBREAKPOINT that ask for Python's debugger, which this one is
_RAYS_PREFIX = "ray."  # of the values for Ray's debugger


def terminal_of_command() -> str | None:
    """Return the name of this process's terminal; None if its input or its output is not a terminal with a name."""
    if os.isatty(0) and os.isatty(1):
        with suppress(OSError):  # in a container, the terminal may be one of the machine around it, without a name here
            return os.ttyname(0)
    return None


def open_at_breakpoints(terminal: str | None, report: Callable[[bool], object]) -> None:
    """Have ``breakpoint()`` in this process open a debugger in ``terminal``; without one, raise UsageError.

    If the user's variable PYTHONBREAKPOINT names a debugger other than Python's, ``breakpoint()`` opens that one.
    ``report`` is called with True before the debugger first asks for a command, and with False when the loop goes on.

    Example: ``open_at_breakpoints("/dev/pts/1", reporter.note_debugger)``
    """
    debugger: TerminalDebugger | None = None

    def hook(*arguments: Any, **options: Any) -> Any:
        nonlocal debugger
        # Ray's debugger is not the user's choice: Ray names it in the variable in each process of a cluster.
        debugger_name = os.environ.get("PYTHONBREAKPOINT", "")
        if debugger_name not in _PYTHONS_OWN and not debugger_name.startswith(_RAYS_PREFIX):
            return sys.__breakpointhook__(*arguments, **options)
        frame = sys._getframe(1)
        if terminal is None:
            where = users_line(traceback.extract_stack(frame))
            raise UsageError(
                f"breakpoint() in the loop ({where}) needs a terminal and a single worker without Ray: run the command "
                "in a terminal with --backend local --workers 1, or take the call out."
            )
        debugger = debugger or TerminalDebugger(terminal, report)
        debugger.set_trace(frame)
        return None

    sys.breakpointhook = hook


class TerminalDebugger(pdb.Pdb):
    """Python's debugger in the terminal with the name ``terminal``; ``report`` as in :func:`open_at_breakpoints`."""

    def __init__(self, terminal: str, report: Callable[[bool], object]) -> None:
        # Without O_NOCTTY, the terminal might become this process's controlling one, which sends it signals.
        descriptor = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
        questions, answers = os.fdopen(os.dup(descriptor), "w"), os.fdopen(descriptor)  # open until the process ends
        super().__init__(stdin=answers, stdout=questions, nosigint=True)
        self._report = report
        self._is_open = False

    def interaction(self, *arguments: Any) -> None:
        """Ask for commands; pdb calls this where it stops."""
        if not self._is_open:
            self._is_open = True
            self._report(True)
        super().interaction(*arguments)

    def set_continue(self) -> None:
        """Let the loop go on to the next breakpoint; pdb calls this."""
        super().set_continue()
        self._close()

    def set_quit(self) -> None:
        """End the loop by BdbQuit, which pdb raises; pdb calls this."""
        super().set_quit()
        self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._report(False)
