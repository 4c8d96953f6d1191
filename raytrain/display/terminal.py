"""A run in the terminal: a live view where there is a screen, a plain line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain.display.live_view import LiveView
from raytrain.display.plots import Plot, Series
from raytrain.runs.history import Row
from raytrain.runs.monitor import Snapshot

STATUS_STYLES = {"starting": "yellow", "running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}
_FIGURES = {
    "images_per_s": "{:,.0f} images/s",
    "learning_rate": "learning rate {:.3g}",
    "data_wait_fraction": "waiting for data {:.0%}",
}
_NUM_EVENTS_SHOWN = 4
_LINES_BESIDE_PLOTS = 13 + _NUM_EVENTS_SHOWN


class TerminalView(LiveView):
    """Shows one run: ``with TerminalView() as view``, then ``view.update(snapshot)`` about twice a second.

    Args:
        console: where to; by default standard output. Its ``is_terminal`` decides between the live view and plain lines.
        interval_s: seconds between plain lines.
        clock: seconds that only go forward.
    """

    def __init__(self, console: Console | None = None, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, "looking at the data, starting the workers …")
        self._interval_s = interval_s
        self._clock = clock
        self._rows: list[Row] = []
        self._num_events = 0
        self._next_line = clock()

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which was asked for with the ``cursor`` of the one before."""
        self._rows[snapshot.first_row :] = snapshot.rows
        if self._live is None:
            self._print_lines(snapshot)
        else:
            self._draw(dashboard(snapshot, self._rows, _plot_height(self._console)), stays=True)

    def _print_lines(self, snapshot: Snapshot) -> None:
        for event in snapshot.events:
            if event.number >= self._num_events:
                self._print(f"{duration(event.at_s)}  {event.text}")
                self._num_events = event.number + 1
        if snapshot.rows and (self._clock() >= self._next_line or snapshot.over):
            self._print(plain_line(snapshot))
            self._next_line = self._clock() + self._interval_s

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def plain_line(snapshot: Snapshot) -> str:
    """How the run stands, as one line of text."""
    parts = [f"step {snapshot.step:,}/{snapshot.num_steps:,}", f"epoch {snapshot.epoch}/{snapshot.num_epochs}"]
    latest = snapshot.latest or {}
    parts += [f"{quantity} {_decimal(latest[quantity])}" for quantity in ("loss", "accuracy") if quantity in latest]
    parts += _figures(snapshot)
    if snapshot.time_left_s is not None:
        parts.append(f"{duration(snapshot.time_left_s)} left")
    return "  ".join(parts)


def dashboard(snapshot: Snapshot, rows: Sequence[Row], plot_height: int = 8) -> RenderableType:
    """The whole picture of a run: heading, progress, loss and accuracy over the steps, figures and last events."""
    workers = "1 worker" if snapshot.num_workers == 1 else f"{snapshot.num_workers} workers"
    style = STATUS_STYLES[snapshot.status]
    state = "stopping" if snapshot.stop_reason and not snapshot.over else snapshot.status
    return Panel(
        Group(
            Text(heading(snapshot), style="bold"),
            _progress(snapshot),
            Text(),
            curves(rows, plot_height),
            Text(),
            Text("   ".join([workers, *_figures(snapshot)]), no_wrap=True, overflow="ellipsis"),
            *_last_events(snapshot),
        ),
        title=Text.assemble((snapshot.name, "bold"), "  ", (state, style)),
        title_align="left",
        subtitle=None if snapshot.over else "Ctrl-C stops with a checkpoint, twice aborts",
        subtitle_align="right",
        border_style=style,
        padding=(1, 2),
    )


def curves(rows: Sequence[Row], height: int = 8) -> RenderableType:
    """Loss and accuracy over the steps, side by side: the training as a line, the evaluations as dots."""
    return side_by_side(*(Plot(quantity, _series(rows, quantity), height) for quantity in ("loss", "accuracy")))


def run_curves(runs: Mapping[str, tuple[str, Sequence[Row]]], height: int = 10) -> RenderableType:
    """Training loss and test accuracy over the steps, side by side, a line for each of the named ``runs`` in its style."""
    losses, accuracies = (
        [_one_series(name, style, [row for row in rows if row["kind"] == kind], quantity) for name, (style, rows) in runs.items()]
        for kind, quantity in (("step", "loss"), ("evaluation", "accuracy"))
    )
    return side_by_side(Plot("training loss", losses, height), Plot("test accuracy", accuracies, height))


def side_by_side(left: Plot, right: Plot) -> RenderableType:
    """Two plots, each half as wide as the screen."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def heading(snapshot: Snapshot) -> str:
    """The title over the curves: epoch and time elapsed."""
    return f"Epoch: {snapshot.epoch}, Elapsed: {duration(snapshot.elapsed_s)}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 00:12:34."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}"


def _figures(snapshot: Snapshot) -> list[str]:
    """Speed and the like, as far as it is known."""
    latest = snapshot.latest or {}
    figures = [text.format(latest[name]) for name, text in _FIGURES.items() if latest.get(name) is not None]
    counts = {"skipped": snapshot.num_skipped, "retries": snapshot.num_retries}
    return figures + [f"{number:,} {what}" for what, number in counts.items() if number]


def _progress(snapshot: Snapshot) -> RenderableType:
    texts = [
        Text(f"{snapshot.step / snapshot.num_steps:.0%}", style="bold"),
        Text(f"epoch {snapshot.epoch}/{snapshot.num_epochs}"),
        Text(f"step {snapshot.step:,}/{snapshot.num_steps:,}"),
        Text("" if snapshot.time_left_s is None else f"{duration(snapshot.time_left_s)} left", style="cyan"),
    ]
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(ratio=1)
    for _ in texts:
        line.add_column(no_wrap=True)
    bar = ProgressBar(total=snapshot.num_steps, completed=snapshot.step, complete_style="cyan", finished_style="green")
    line.add_row(bar, *texts)
    return line


def _last_events(snapshot: Snapshot) -> list[RenderableType]:
    """Always as many lines, so that the picture keeps its height."""
    events = snapshot.events[-_NUM_EVENTS_SHOWN:]
    lines = [Text.assemble((duration(event.at_s), "dim"), f"  {event.text}") for event in events]
    lines += [Text()] * (_NUM_EVENTS_SHOWN - len(lines))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return [Text(), *lines]


def _series(rows: Sequence[Row], quantity: str) -> list[Series]:
    return [
        _one_series("train", "cyan", [row for row in rows if row["kind"] == "step"], quantity),
        _one_series("test", "yellow", [row for row in rows if row["kind"] == "evaluation"], quantity, mark="●"),
    ]


def _one_series(label: str, style: str, rows: Sequence[Row], quantity: str, mark: str | None = None) -> Series:
    return Series(label, style, [row["step"] for row in rows], [row.get(quantity) for row in rows], mark)


def _decimal(value: float | None) -> str:
    """A history that was read back has None where the number was not finite."""
    return "nan" if value is None else f"{value:.3f}"


def _plot_height(console: Console) -> int:
    """As many lines as the screen has left beside the others."""
    return max(3, min(10, console.height - _LINES_BESIDE_PLOTS))
