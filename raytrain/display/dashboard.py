"""The picture of a run that trains: progress, loss and accuracy, machines, events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raytrain.display.console import format_count, format_duration, status_style
from raytrain.display.curves import curve_heading, curve_plots
from raytrain.display.event_text import event_text
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.metric_row import MetricRow, own_metrics
from raytrain.runs.redact import one_line

CTRL_C = "Ctrl-C stops with a checkpoint, twice aborts"  # what Ctrl-C does to a run of this process
_NUM_EVENTS_SHOWN = 4
_LINES_BESIDE_PLOTS = 13 + _NUM_EVENTS_SHOWN
_MEASUREMENTS = {
    "images_per_s": "{:,.0f} images/s",
    "learning_rate": "learning rate {:.3g}",
    "data_wait_fraction": "waiting for data {:.0%}",
}


def progress_line(snapshot: Snapshot) -> str:
    """Step, epoch, loss, accuracy, speed and time left, as far as they are known."""
    parts = [f"step {snapshot.step:,}/{snapshot.num_steps:,}", f"epoch {snapshot.epoch}/{snapshot.num_epochs}"]
    measured = snapshot.latest.metrics if snapshot.latest else {}
    parts += [f"{name} {_decimal(measured[name])}" for name in ("loss", "accuracy") if name in measured]
    parts += [*_own_metrics(snapshot), *measurements(snapshot)]
    return "  ".join([*parts, *_time_left(snapshot)])


def measurements(snapshot: Snapshot) -> list[str]:
    """Speed, learning rate, waiting time, skipped images and retries, as far as they are known and not zero."""
    latest = snapshot.latest
    values = {name: latest.value(name) for name in _MEASUREMENTS} if latest else {}
    texts = [_MEASUREMENTS[name].format(value) for name, value in values.items() if value is not None]
    counts = {"skipped": snapshot.num_skipped, "retries": snapshot.num_retries}
    return texts + [f"{number:,} {what}" for what, number in counts.items() if number]


def _time_left(snapshot: Snapshot) -> list[str]:
    """Nothing in the last second: an evaluation or a checkpoint may follow, which takes longer."""
    left_s = snapshot.time_left_s or 0.0
    return [f"{format_duration(left_s)} left"] if left_s >= 1 else []


def _own_metrics(snapshot: Snapshot) -> list[str]:
    values = own_metrics(snapshot.latest, snapshot.evaluation)
    return [f"{one_line(name)} {_decimal(value)}" for name, value in values.items()]


def _decimal(value: float | None) -> str:
    """A metric is None if it was not finite when it was written."""
    if value is None or not 0 < abs(value) < 0.001:
        return "nan" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2g}"


def dashboard(
    snapshot: Snapshot, rows: Sequence[MetricRow], plot_height: int = 8, hint: str = CTRL_C
) -> RenderableType:
    """The picture, with the curves of all ``rows`` so far. Its height stays the same while the run trains."""
    style = status_style(snapshot.status)
    status = "stopping" if snapshot.stop_request and not snapshot.over else snapshot.status
    return Panel(
        Group(
            Text(curve_heading(snapshot.epoch, snapshot.elapsed_s, snapshot.startup_s), style="bold"),
            _progress(snapshot),
            Text(),
            curve_plots(rows, plot_height),
            Text(),
            _figures(snapshot),
            *_last_events(snapshot),
        ),
        title=Text.assemble((snapshot.name, "bold"), "  ", (status, style)),
        title_align="left",
        subtitle=None if snapshot.over else hint,
        subtitle_align="right",
        border_style=style,
        padding=1,
    )


def plot_height(console: Console) -> int:
    """The number of lines that the rest of the picture leaves for the plots."""
    return max(3, min(10, console.height - _LINES_BESIDE_PLOTS))


def _figures(snapshot: Snapshot) -> RenderableType:
    """Workers and measurements; before there are any, a line that moves."""
    if snapshot.status == "starting":
        waiting = Spinner("dots", "waiting for the workers …")
        waiting.start_time = 0.0  # so that the next picture's goes on where this one's is
        return waiting
    figures = [format_count(snapshot.num_workers, "worker"), *_own_metrics(snapshot), *measurements(snapshot)]
    return Text("   ".join(figures), no_wrap=True, overflow="ellipsis")


def _progress(snapshot: Snapshot) -> RenderableType:
    texts = [
        Text(f"{snapshot.step / snapshot.num_steps:.0%}", style="bold"),
        Text(f"epoch {snapshot.epoch}/{snapshot.num_epochs}"),
        Text(f"step {snapshot.step:,}/{snapshot.num_steps:,}"),
        Text("".join(_time_left(snapshot)), style="cyan"),
    ]
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(ratio=1)
    for _ in texts:
        line.add_column(no_wrap=True)
    bar = ProgressBar(total=snapshot.num_steps, completed=snapshot.step, complete_style="cyan", finished_style="green")
    line.add_row(bar, *texts)
    return line


def _last_events(snapshot: Snapshot) -> list[RenderableType]:
    """Always the same number of lines, so that the picture keeps its height."""
    events = snapshot.events[-_NUM_EVENTS_SHOWN:]
    lines = [
        Text.assemble((format_duration(at_s), "dim"), f"  {one_line(event_text(event))}") for _, at_s, event in events
    ]
    lines += [Text()] * (_NUM_EVENTS_SHOWN - len(lines))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return [Text(), *lines]
