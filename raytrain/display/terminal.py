"""A run in the terminal: a picture that is redrawn in place, or plain lines."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from raytrain.monitor.snapshot import Snapshot, View
from raytrain.runs.logs import EVENTS, STARTUP, redirect_handlers
from raytrain.runs.metrics_history import sample_of_rows
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from typing_extensions import Self


_NUM_ROWS = 2**12  # of a run's history that are drawn: more than a terminal has dots


class LiveView:
    """Base class of the views of a run and of a sweep: a context manager that owns a part of the terminal.

    On a ``console`` that is a terminal or a notebook, it redraws a picture in place; otherwise, it prints plain lines.
    The text ``waiting`` is shown first; then, until there is a picture, whatever the command waits for. While it is
    open, handlers of Python's logging that write to the terminal write above the picture.
    """

    def __init__(self, console: Console | None, waiting: str) -> None:
        self._console = console or PlainConsole()
        self._live: Live | CellOutput | None = None  # what draws the picture; None if plain lines are printed
        spinner = Spinner("dots", waiting)

        # Before there is a picture, what the command waits for is shown in its place, or printed as a line.
        report = self._print
        if self._console.is_jupyter or (is_notebook() and self._console.file is sys.stdout):
            self._live = CellOutput(waiting)  # a kernel claims to be a terminal, but redraws nothing
            report = lambda line: self._draw(Text(line), keep=True)  # noqa: E731
        elif self._console.is_terminal:
            self._live = Live(spinner, console=self._console, transient=True)
            report = lambda line: spinner.update(text=line)  # noqa: E731
        self._report = report

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            if self._live is not None:
                # rich replaces sys.stdout and sys.stderr by streams that print above its picture. The handlers of a
                # script's loggers keep the streams that they have got, so they are given the new ones.
                streams = sys.stdout, sys.stderr
                self._live.start(refresh=True)
                opened.callback(self._stop_live)
                for before, after in zip(streams, (sys.stdout, sys.stderr), strict=True):
                    redirect_handlers(before, after)
                    opened.callback(redirect_handlers, after, before)

            # A script that logs at level INFO would print each line of the view a second time.
            for logger in (STARTUP, EVENTS):
                opened.enter_context(_kept_from_handlers(logger))
            opened.enter_context(startup_lines(self._report))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def _stop_live(self) -> None:
        """Leave the last picture as it is."""
        if self._live is not None:  # it is None if a debugger has taken its place
            self._live.stop()

    def _print(self, line: str) -> None:
        """Print a line as it is, without wrapping it; a live picture stays below it."""
        self._console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def _draw(self, picture: RenderableType, *, keep: bool) -> None:
        """Draw ``picture`` in place of the last one; with ``keep``, it stays on the screen when the view ends."""
        assert self._live is not None
        self._live.transient = not keep
        # Two columns stay free for the ^C that a terminal echoes: a line break before it would shift the picture.
        self._live.update(Constrain(picture, self._console.width - 2), refresh=True)


@contextmanager
def _kept_from_handlers(logger: logging.Logger) -> Iterator[None]:
    """Keep the records of ``logger`` from the handlers of the loggers above it while this is open.

    If the logger ``raytrain`` has a level of its own, which ``--debug`` sets, somebody has asked for these records, so
    they are passed on.
    """
    propagate = logger.propagate
    logger.propagate = propagate and logging.getLogger("raytrain").level != logging.NOTSET
    try:
        yield
    finally:
        logger.propagate = propagate


@contextmanager
def startup_lines(report: Callable[[str], object], source: logging.Logger = STARTUP) -> Iterator[None]:
    """While this is open, call ``report`` with each line that the logger ``source`` logs.

    By default, these are the lines that say what the start of a run waits for, such as ``listing the images …``.
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


@contextmanager
def default_view(view: View | None) -> Iterator[View | None]:
    """Yield ``view`` itself; without one, the method ``update`` of a :class:`TerminalView` that is open meanwhile.

    Without a view in another thread than the main one, yield None, so that nothing is shown: a terminal has room for
    one picture, and programs that start runs in threads have views of their own.
    """
    if view is not None or threading.current_thread() is not threading.main_thread():
        yield view
        return
    with TerminalView() as terminal:
        yield terminal.update


class TerminalView(LiveView):
    """Shows one run; :meth:`update` takes its snapshots, about twice a second.

    In a terminal or below a notebook's cell, it draws a picture. Elsewhere it prints plain lines: events, and the
    progress at most every ``interval_s`` seconds by ``clock``. It prints to ``console``, by default standard output.
    ``hint`` says what Ctrl-C does.

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
        self._num_events = 0  # that are printed
        self._next_line_s = clock()  # the earliest time of the next line of progress
        self._printed = (0, 0)  # the step of the last line of progress, and that of its measurements

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which continues the one before (see :class:`Snapshot`)."""
        self._rows.follow(snapshot.first_row, snapshot.rows)
        # A debugger in the loop needs the terminal for itself: from its first prompt on, nothing is redrawn.
        if snapshot.in_debugger and not snapshot.over:
            if isinstance(self._live, Live):
                self._live.stop()
                self._live = None
            return
        if self._live is not None:
            self._draw(dashboard(snapshot, self._rows.rows, plot_height(self._console), self._hint), keep=True)
            return

        # Plain lines: each event at once, and the progress every few seconds and at the end. A run that was started
        # again in this process, because it had lost its coordinator or agent, counts its events from 0 again.
        if not snapshot.events or snapshot.events[-1].number < self._num_events - 1:
            self._num_events = 0
        for number, at_s, event in snapshot.events:
            if number >= self._num_events:
                self._print(f"{format_duration(at_s)}  {event_text(event)}")
                self._num_events = number + 1
        is_due = snapshot.rows and self._clock() >= self._next_line_s
        shown = snapshot.step, snapshot.latest.step if snapshot.latest else 0
        is_last = snapshot.over and self._rows.rows and shown != self._printed
        # A run that resumes has rows of earlier attempts while it starts, but has made no step yet.
        if (is_due or is_last) and snapshot.status != "starting":
            self._print(progress_line(snapshot))
            self._next_line_s, self._printed = self._clock() + self._interval_s, shown
