"""The terminal's picture of a run that trains: progress, curves, measurements and the last events in one frame."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raytrain.display.console import format_duration, format_optional, status_style
from raytrain.display.curves import curve_heading, curve_plots
from raytrain.display.event_text import event_text
from raytrain.errors import format_count, format_dollars
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.metric_row import MetricRow, own_metrics
from raytrain.runs.redact import one_line

CTRL_C = "Ctrl-C stops with a checkpoint, twice aborts"  # what Ctrl-C does to a run of this process
_NUM_EVENTS_SHOWN = 4
_LINES_BESIDE_PLOTS = 13 + _NUM_EVENTS_SHOWN  # frame, heading, bar, measurements, events and the lines between
_MEASUREMENTS = {
    "images_per_s": "{:,.0f} images/s",
    "learning_rate": "learning rate {:.3g}",
    "data_wait_fraction": "waiting for data {:.0%}",
}


def dashboard(
    snapshot: Snapshot, rows: Sequence[MetricRow], plot_height: int = 8, hint: str = CTRL_C
) -> RenderableType:
    """Return the picture, with the curves of all ``rows`` so far. Its height stays the same while the run trains.

    The plots are ``plot_height`` lines high, and ``hint`` is shown at the lower right while the run trains.
    """
    # The progress bar, and right of it percent, epoch, step and time left.
    texts = [
        Text(f"{snapshot.step / snapshot.num_steps:.0%}", style="bold"),
        Text(f"epoch {snapshot.epoch}/{snapshot.num_epochs}"),
        Text(f"step {snapshot.step:,}/{snapshot.num_steps:,}"),
        Text("".join(_time_left(snapshot)), style="cyan"),
    ]
    progress = Table.grid(expand=True, padding=(0, 2, 0, 0))
    progress.add_column(ratio=1)
    for _ in texts:
        progress.add_column(no_wrap=True)
    bar = ProgressBar(total=snapshot.num_steps, completed=snapshot.step, complete_style="cyan", finished_style="green")
    progress.add_row(bar, *texts)

    # The workers and what they measure; before there are any, a spinner. Each picture has a spinner of its own; all
    # have the same start time, so that it goes on turning from one picture to the next.
    figures: RenderableType
    if snapshot.status == "starting":
        figures = Spinner("dots", "waiting for the workers …")
        figures.start_time = 0.0
    else:
        parts = [format_count(snapshot.num_workers, "worker"), *_own_metrics(snapshot), *_measurements(snapshot)]
        figures = Text("   ".join(parts), no_wrap=True, overflow="ellipsis")

    # The last events, padded to a fixed number of lines.
    events = [
        Text.assemble((format_duration(at_s), "dim"), f"  {one_line(event_text(event))}")
        for _, at_s, event in snapshot.events[-_NUM_EVENTS_SHOWN:]
    ]
    events += [Text()] * (_NUM_EVENTS_SHOWN - len(events))
    for line in events:
        line.no_wrap, line.overflow = True, "ellipsis"

    # A frame around all of it, in the colour of the status.
    style = status_style(snapshot.status)
    status = "stopping" if snapshot.stop_request and not snapshot.over else snapshot.status
    return Panel(
        Group(
            Text(curve_heading(snapshot.epoch, snapshot.elapsed_s, snapshot.startup_s), style="bold"),
            progress,
            Text(),
            curve_plots(rows, plot_height),
            Text(),
            figures,
            Text(),
            *events,
        ),
        title=Text.assemble((snapshot.name, "bold"), "  ", (status, style)),
        title_align="left",
        subtitle=None if snapshot.over else hint,
        subtitle_align="right",
        border_style=style,
        padding=1,
    )


def plot_height(console: Console) -> int:
    """Return the number of lines that the rest of the picture leaves for the plots."""
    return max(3, min(10, console.height - _LINES_BESIDE_PLOTS))


def progress_line(snapshot: Snapshot) -> str:
    """Return step, epoch, loss, accuracy, other measurements and time left as one line, as far as they are known.

    If the latest measurements are of an earlier step, as with ``--log-every``, the line names it before them:
    ``step 18/36  epoch 2/4  at step 10: loss 1.619``.
    """
    parts = [f"step {snapshot.step:,}/{snapshot.num_steps:,}", f"epoch {snapshot.epoch}/{snapshot.num_epochs}"]
    latest = snapshot.latest
    measured = latest.metrics if latest else {}
    figures = [f"{name} {_decimal(measured[name])}" for name in ("loss", "accuracy") if name in measured]
    figures += [*_own_metrics(snapshot), *_measurements(snapshot)]
    if latest and latest.step != snapshot.step and figures:
        figures[0] = f"at step {latest.step:,}: {figures[0]}"
    return "  ".join([*parts, *figures, *_time_left(snapshot)])


def _measurements(snapshot: Snapshot) -> list[str]:
    """Return speed, learning rate, waiting time and cost, each if it is known, and counts that are not zero.

    Counted are images that could not be used, requests that were retried, and images that CPUs decoded in place of
    GPUs.
    """
    latest = snapshot.latest
    values = {name: latest.value(name) for name in _MEASUREMENTS} if latest else {}
    texts = [_MEASUREMENTS[name].format(value) for name, value in values.items() if value is not None]
    counts = {
        "skipped": snapshot.num_skipped,
        "retry" if snapshot.num_retries == 1 else "retries": snapshot.num_retries,
        "decoded on CPU": snapshot.num_decoded_on_cpu,
    }
    return texts + [f"{count:,} {name}" for name, count in counts.items() if count] + cost_texts(snapshot)


def cost_texts(snapshot: Snapshot) -> list[str]:
    """Return the dollars and the energy of the GPUs so far, as far as they are known."""
    dollars = [] if snapshot.dollars is None else [format_dollars(snapshot.dollars)]
    return dollars + ([] if snapshot.gpu_kwh is None else [f"{snapshot.gpu_kwh:.2f} kWh"])


def _time_left(snapshot: Snapshot) -> list[str]:
    """Return the time left, as a list of one text.

    The list is empty if the time is not known, and in the last second: an evaluation or a checkpoint may follow, so
    that 0 seconds would be wrong.
    """
    left_s = snapshot.time_left_s or 0.0
    return [f"{format_duration(left_s)} left"] if left_s >= 1 else []


def _own_metrics(snapshot: Snapshot) -> list[str]:
    """Return the metrics besides loss and accuracy, those that a user's own loop logs, with their names."""
    values = own_metrics(snapshot.latest, snapshot.evaluation)
    return [f"{one_line(name)} {_decimal(value)}" for name, value in values.items()]


def _decimal(value: float | None) -> str:
    """Return a metric with three digits after the point, fewer if it is very large or small; nan for None.

    None stands for a value that was not finite.
    """
    if value is None:
        return "nan"
    if 0 < abs(value) < 0.001:
        return f"{value:.2g}"
    return format_optional(value, ".3f" if abs(value) < 1000 else ",.0f")
