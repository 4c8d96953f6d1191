"""A run in the terminal: redrawn in place, or a line at a time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from raytrain.display.console import PlainConsole, format_duration
from raytrain.display.dashboard import CTRL_C, dashboard, plot_height, progress_line
from raytrain.display.event_text import event_text
from raytrain.display.notebook import INTERRUPT, WAITING, CellOutput, is_notebook
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.history import sample_of_rows
from raytrain.runs.logs import STARTUP
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from typing_extensions import Self


_NUM_ROWS = 2**12  # of a run's history that are drawn: more than a terminal has dots


class LiveView:
    """Base class of the views of a run and of a sweep: a context manager that owns a part of the terminal.

    On a ``console`` that is a terminal or a notebook, it redraws a picture in place; otherwise, it prints plain lines.
    ``waiting`` is shown until there is a picture, or something else to wait for.
    """

    def __init__(self, console: Console | None, waiting: str) -> None:
        self._console = console or PlainConsole()
        self._live: Live | CellOutput | None = None
        spinner = Spinner("dots", waiting)

        # What the command waits for, before there is a picture, is shown by the same means.
        report = self._print
        if self._console.is_jupyter or (is_notebook() and self._console.file is sys.stdout):
            self._live = CellOutput(waiting)  # a kernel says that its output is a terminal, where nothing is redrawn
            report = lambda line: self._draw(Text(line), keep=True)  # noqa: E731
        elif self._console.is_terminal:
            self._live = Live(spinner, console=self._console, transient=True)
            report = lambda line: spinner.update(text=line)  # noqa: E731
        self._startup_lines = startup_lines(report)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        self._startup_lines.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._startup_lines.__exit__(None, None, None)
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        """Print a line as it is, without wrapping it; a live picture stays below it."""
        self._console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def _draw(self, picture: RenderableType, *, keep: bool) -> None:
        """Draw ``picture`` in place of the last one; with ``keep``, it stays on the screen when the view ends."""
        assert self._live is not None
        self._live.transient = not keep
        # On the right is room for the ^C that a terminal shows, which would move the picture if it began a line.
        self._live.update(Constrain(picture, self._console.width - 2), refresh=True)


@contextmanager
def startup_lines(report: Callable[[str], object], source: logging.Logger = STARTUP) -> Iterator[None]:
    """Pass each thing that the command waits for, before a run trains, to ``report`` while this is open.

    ``source`` may be a part of these lines.
    """

    def emit(record: logging.LogRecord) -> None:
        report(one_line(record.getMessage()))

    handler = logging.Handler()
    handler.emit = emit
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    try:
        yield
    finally:
        source.removeHandler(handler)
        source.setLevel(logging.INFO if source.handlers else logging.NOTSET)


class TerminalView(LiveView):
    """Shows one run, whose state it is given about twice a second by ``update``.

    In a terminal or below a notebook's cell it is a picture, elsewhere plain lines, at most one each ``interval_s``
    seconds besides the events. It prints to standard output, or to ``console``. ``hint`` says what Ctrl-C does.

    Example::

        with TerminalView() as view:
            raytrain.train(config, view=view.update)
    """

    def __init__(
        self,
        console: Console | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        hint: str = CTRL_C,
    ) -> None:
        super().__init__(console, WAITING)
        self._interval_s = interval_s
        self._hint = INTERRUPT if isinstance(self._live, CellOutput) and hint == CTRL_C else hint
        self._clock = clock
        self._rows = sample_of_rows(_NUM_ROWS)
        self._num_events = 0
        self._next_line_s = clock()

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which continues the one before (see :class:`Snapshot`)."""
        self._rows.follow(snapshot.first_row, snapshot.rows)
        # A debugger in the loop has the terminal: from its first question on, nothing is redrawn.
        if snapshot.in_debugger and not snapshot.over:
            if isinstance(self._live, Live):
                self._live.stop()
                self._live = None
            return
        if self._live is not None:
            self._draw(dashboard(snapshot, self._rows.rows, plot_height(self._console), self._hint), keep=True)
            return

        # Plain lines: each event at once, and how far the run is every few seconds and at its end.
        for number, at_s, event in snapshot.events:
            if number >= self._num_events:
                self._print(f"{format_duration(at_s)}  {event_text(event)}")
                self._num_events = number + 1
        trains = snapshot.rows and snapshot.status != "starting"  # a run that resumes has rows, but no step yet
        if trains and (self._clock() >= self._next_line_s or snapshot.over):
            self._print(progress_line(snapshot))
            self._next_line_s = self._clock() + self._interval_s
