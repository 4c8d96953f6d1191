"""The part of a terminal that is redrawn all the time; if the output is not a terminal, there is no such part."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from raytrain.display.console import PlainConsole
from raytrain.runs.printable import one_line
from raytrain.runs.startup_log import STARTUP

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class LiveView:
    """Base class of the views of a run and of a sweep: a context manager that owns a part of the terminal.

    Args:
        console: where to print, by default standard output. If it is a terminal, the view redraws a picture in place;
            otherwise, it prints plain lines.
        waiting: what is shown until there is a picture, or something else to wait for.
    """

    def __init__(self, console: Console | None, waiting: str) -> None:
        self._console = console or PlainConsole()
        self._live: Live | None = None
        spinner = Spinner("dots", waiting)
        self._startup_line = _StartupLine(spinner)
        if self._console.is_terminal:
            self._live = Live(spinner, console=self._console, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
            STARTUP.setLevel(logging.INFO)
            STARTUP.addHandler(self._startup_line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            STARTUP.removeHandler(self._startup_line)
            STARTUP.setLevel(logging.NOTSET)
            self._live.stop()

    def _print(self, line: str) -> None:
        """Print a line as it is, without wrapping it; a live picture stays below it."""
        self._console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def _draw(self, picture: RenderableType, *, keep: bool) -> None:
        """Draw ``picture`` in place of the last one; with ``keep``, it stays on the screen when the view ends."""
        assert self._live is not None
        self._live.transient = not keep
        self._live.update(picture, refresh=True)


class _StartupLine(logging.Handler):
    """Shows what the command waits for beside a spinner."""

    def __init__(self, spinner: Spinner) -> None:
        super().__init__()
        self._spinner = spinner

    def emit(self, record: logging.LogRecord) -> None:
        """Called by ``logging``."""
        self._spinner.update(text=Text(one_line(record.getMessage())))
