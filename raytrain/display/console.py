"""A console that shows control characters instead of obeying them, tables, and numbers, times and options as text."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import IO, Any, cast

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from raytrain.errors import format_count
from raytrain.runs.outcome import as_tuple
from raytrain.runs.redact import one_line, printable

_STATUS_STYLES = {
    "waiting": "dim",
    "starting": "yellow",
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
}
UNKNOWN = "–"
"""A dash in place of a value that is not known."""
_HUGE = 1e9  # floats from here on have an exponent
_NUM_CLASSES = 20  # most classes in a table
_LONGEST_ROW = 10_000  # characters of a row of a table that is not wrapped
_RUN_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")


def status_style(status: str) -> str:
    """Return the colour of a status; red for any other, such as interrupted."""
    return _STATUS_STYLES.get(status, "red")


def run_styles(runs: Sequence[object]) -> list[str]:
    """Return a colour for each of ``runs``; from the seventh on, colours repeat."""
    return [_RUN_STYLES[number % len(_RUN_STYLES)] for number in range(len(runs))]


class _Unflushed:
    """A stream around an object that can only write: flushing it does nothing."""

    def __init__(self, stream: IO[str]) -> None:
        self.write = stream.write

    def flush(self) -> None:
        pass


class PlainConsole(Console):
    """A rich console without markup and emoji codes, which shows control characters instead of sending them.

    Names of runs, classes and images, and answers of servers, may contain anything.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        # COLUMNS=0 counts as unset, as in Python's own functions; with a width of 0, rich would print nothing.
        if 0 in self.size:
            self.size = shutil.get_terminal_size((80, 25))

    def _stream(self) -> IO[str]:
        """Return the stream to print to; scripts may replace sys.stdout by an object that can only write."""
        stream = super().file
        return stream if hasattr(stream, "flush") else cast(IO[str], _Unflushed(stream))

    file = Console.file.getter(_stream)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich is handling; rich itself would end the process, even one that trains."""
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as :meth:`rich.console.Console.render` does, with control characters made visible.

        What is printed with ``soft_wrap`` has tables as wide as their content: rich would break a path to make it fit.
        """
        options = options or self.options
        if options.no_wrap and isinstance(renderable, Table) and not renderable.expand:
            options = options.update(width=_LONGEST_ROW)
        for segment in super().render(renderable, options):
            # Segments with controls are rich's own, such as cursor movements; all others are text.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds, as in 00:12:34."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}"


def format_time(time: datetime) -> str:
    """Return day and time in the local time zone, as in Nov 22 09:53."""
    return f"{time.astimezone():%b %d %H:%M}"


def format_optional(value: float | None, spec: str) -> str:
    """Return ``value`` in the format ``spec``, or a dash if it is not known.

    A float of ten digits or more, such as the loss of a run that diverges, has an exponent instead.
    """
    if value is None:
        return UNKNOWN
    return f"{value:{'.3g' if isinstance(value, float) and abs(value) >= _HUGE else spec}}"


def format_value(value: object) -> str:
    """Return any plain value as text, with as many digits as are worth reading.

    Example:
        >>> format_value(0.98765), format_value(12345.678), format_value(0.0000123), format_value(3.0)
        ('0.9877', '12,345.7', '1.2e-05', '3')
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if not isinstance(value, float):
        return one_line(str(value))

    # Below 10, which may be an accuracy or a loss, four digits after the point; above, one. A number that would be
    # 0.0000 has an exponent.
    if value.is_integer():
        return format_optional(value, ",.0f")
    if abs(value) >= 10:
        return format_optional(value, ",.1f")
    return f"{value:.4f}" if abs(value) >= 1e-4 else f"{value:.1e}"


def metric_label(name: str) -> str:
    """Return a metric as it is shown, with blanks in its name; a loop may have chosen any text."""
    return one_line(name.replace("_", " "))


def format_option(value: object) -> str:
    """Return the value of an option as a user types it; the values of a tuple are separated by blanks.

    None is a dash.
    """
    return " ".join(
        UNKNOWN if item is None else f"{item:g}" if isinstance(item, float) else one_line(str(item))
        for item in as_tuple(value)
    )


def format_gigabytes(num_bytes: int) -> str:
    """Return a size, as in 1.5 GB, 143 GB."""
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 100e9 else f"{num_bytes / 1e9:,.1f} GB"


def key_value_table(values: Mapping[str, object]) -> RenderableType:
    """Return a line for each number and text, with its name. The prefix ``num_`` of a name is not shown.

    None, lists, tuples and dicts are left out: ``--json`` has them.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in values.items():
        if value is not None and not isinstance(value, (list, tuple, dict)):
            grid.add_row(one_line(name.removeprefix("num_").replace("_", " ")), format_value(value))
    return grid


def headed_table(words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Return a table of ``rows``: first columns of words, aligned to the left, then columns of numbers, to the right.

    ``words`` and ``numbers`` are their headings. A row may have one more cell than there are headings, such as a bar.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(one_line(name), overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        add_row(table, *row)
    return table


def add_row(table: Table, *cells: RenderableType) -> None:
    """Add a row to a table; a text among its cells, which may contain anything, is shown as it is, in one line."""
    table.add_row(*(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells))


def class_table(numbers: Sequence[str], rows: Sequence[Sequence[RenderableType]], adjective: str) -> RenderableType:
    """Return a table of the first 20 classes, and a line with the number of those left out, if there are any.

    A row has the name of a class and a cell below each heading in ``numbers``. The ``adjective`` is that of the classes
    that are left out, such as ``better``.
    """
    table = headed_table(["class"], numbers, rows[:_NUM_CLASSES])
    num_more = len(rows) - _NUM_CLASSES
    if num_more <= 0:
        return table
    more = Text(f" and {format_count(num_more, f'{adjective} class')}; --json lists them all", style="dim")
    return Group(table, more)


def bar(value: float, largest: float) -> Bar:
    """Return a ``value`` from 0 to ``largest`` as a bar, for a cell of a table."""
    return Bar(largest, 0, value, width=16, color="cyan")
