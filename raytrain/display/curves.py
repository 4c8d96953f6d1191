"""Curves of one run or several: braille plots in the terminal, figures as PNG."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.console import format_duration, metric_label, run_styles
from raytrain.errors import UsageError
from raytrain.runs.metric_row import Kind, MetricRow
from raytrain.runs.records import RunRecord
from raytrain.runs.redact import one_line
from raytrain.storage.open import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, LIGHT = "#666666", "#f1f3f6"
BLUE, ORANGE = "#1f6fb4", "#e8710a"
_DPI = 120
_MAX_EPOCH_LABELS = 20
_MAX_DOTS = 60  # of a line with more points, the points are not marked
_MAX_POINTS = 500  # of a line with more than twice as many, the means of neighbours are drawn
_COLORS = (BLUE, ORANGE)  # of training and evaluations
_DASHES = ("-", "--", ":")  # of the first ten runs, the next ten, and others
_COMPARED: tuple[tuple[str, Kind, str], ...] = (
    ("training loss", "step", "loss"),
    ("validation accuracy", "evaluation", "accuracy"),
)


def save_png(figure: Figure, output: str) -> None:
    """Write ``figure`` to a file, whose folder is created if it does not exist, or to an ``s3://`` object."""
    write_output(output, png_bytes(figure))


def png_bytes(figure: Figure) -> bytes:
    """Return ``figure`` as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


def titled_figure(title: str, width: float, height: float, **style: Any) -> Figure:
    """Return an empty figure of ``width`` x ``height`` inches; ``style`` are matplotlib's options for its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    style = {"weight": "bold", "fontsize": 10, **style}
    figure.suptitle(one_line(title), x=0.01, ha="left", parse_math=False, **style)
    return figure


def plain_axes(axes: Axes) -> None:
    """Draw no frame at the top and the right, but pale horizontal lines, behind the curves, at about six values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=6)


def whole_ticks(axes: Axes) -> None:
    """Label only whole numbers on the x axis: there is no half of a step."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def curve_heading(epoch: int, elapsed_s: float, startup_s: float | None = None) -> str:
    """Return the title above a run's curves: the epoch, the time since the run began, and the part before training."""
    startup = "" if startup_s is None else f", {format_duration(startup_s)} of it start-up"
    return f"Epoch: {epoch}, Elapsed: {format_duration(elapsed_s)}{startup}"


def curve_plots(rows: Sequence[MetricRow], height: int = 8) -> RenderableType:
    """Return loss and accuracy over the steps: a line for training, a dot for each evaluation."""
    return side_by_side(_run_plot("loss", rows, height), _run_plot("accuracy", rows, height))


def side_by_side(left: Plot, right: Plot) -> RenderableType:
    """Return two plots, each half as wide as the screen."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def curve_figure(record: RunRecord) -> Figure:
    """Return loss, accuracy and learning rate of a run over its steps. Raise UsageError if it has no history.

    Example: ``curve_figure(read_run("./runs", "first")).savefig("first.png")``
    """
    _check_history([record])
    last = record.metrics[-1]
    title = f"{record.name}    {curve_heading(last.epoch, record.elapsed_s)}"
    figure = titled_figure(title, 9, 8.5)
    panels = _draw(figure, [_run_plot(name, record.metrics) for name in ("loss", "accuracy", "learning_rate")])
    for panel in panels[:2]:
        if panel.lines:
            panel.legend(loc="best", frameon=False)
    _mark_epochs(panels, record)
    return figure


def comparison_figure(records: Sequence[RunRecord]) -> Figure:
    """Return training loss and validation accuracy of several runs over their steps.

    Raise UsageError if none of them has a history.

    Example: ``comparison_figure([read_run("./runs", name) for name in ("first", "second")]).savefig("both.png")``
    """
    _check_history(records)
    figure = titled_figure("", 9, 7.5)
    panels = _draw(figure, comparison_plots(records, [record.name for record in records]))
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    return figure


# The plots of a terminal and the panels of a figure are described by the same objects, Plot and Series. A figure
# takes from them titles, labels and points; their styles and heights are for a terminal alone.


def _run_plot(metric: str, rows: Sequence[MetricRow], height: int = 8) -> Plot:
    """Return a metric of a run over its steps: a line for training, a dot for each evaluation."""
    measured = _series("validation", "yellow", rows, "evaluation", metric)
    lines = [_series("train", "cyan", rows, "step", metric), replace(measured, mark="●")]
    return Plot(metric_label(metric), lines, height)


def comparison_plots(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Plot]:
    """Return plots of training loss and validation accuracy over the steps, a line for each run, named by its label."""
    runs = list(zip(labels, run_styles(records), records, strict=True))
    plots: list[Plot] = []
    for title, kind, metric in _COMPARED:
        lines = [_series(label, style, record.metrics, kind, metric) for label, style, record in runs]
        plots.append(Plot(title, lines, height=10, legend="below"))
    return plots


def _series(label: str, style: str, rows: Sequence[MetricRow], kind: Kind, metric: str) -> Series:
    """Return the line of a ``metric`` over the steps, from those rows of a ``kind`` that have it."""
    rows = [row for row in rows if row.kind == kind and (metric in row.metrics or row.value(metric) is not None)]
    return Series(label, style, [row.step for row in rows], [row.value(metric) for row in rows])


def _check_history(records: Sequence[RunRecord]) -> None:
    """Raise UsageError if no run has a row of its history yet."""
    if not any(record.metrics for record in records):
        raise UsageError(
            f"Run {records[0].name!r} has no history yet, so there are no curves to draw; its first row is written "
            "after --log-every steps."
        )


def _draw(figure: Figure, plots: Sequence[Plot]) -> list[Axes]:
    """Draw plots below each other, over the same steps, and return the axes of each.

    Points are marked by dots if a line has at most 60. A line with more than 1,000 points would hide all others behind
    a band: the means of 500 groups of neighbours are drawn in its place, and the range of each group in a pale colour.
    """
    from matplotlib.ticker import StrMethodFormatter

    panels: list[Axes] = list(figure.subplots(len(plots), sharex=True))
    for panel, plot in zip(panels, plots, strict=True):
        plain_axes(panel)
        panel.margins(x=0.01)
        panel.set_ylabel(plot.title)
        for number, series in enumerate(plot.series):
            # A series without points, such as that of a run that was never evaluated, is not in the legend either.
            steps, values = series.points()
            if not len(steps):
                continue

            # A single run has one colour for training and one for evaluations; several runs have a colour each.
            if plot.legend == "title":
                style: dict[str, Any] = {"label": f"{series.label} {series.last_value()}", "color": _COLORS[number]}
            else:
                style = {"label": series.label, "color": f"C{number % 10}", "linestyle": _DASHES[number // 10 % 3]}
            if len(steps) > 2 * _MAX_POINTS:
                starts = np.linspace(0, len(steps), _MAX_POINTS, endpoint=False, dtype=np.int64)
                low, high = (extreme.reduceat(values, starts) for extreme in (np.minimum, np.maximum))
                sizes = np.diff(starts, append=len(steps))
                means = (np.add.reduceat(column / np.repeat(sizes, sizes), starts) for column in (steps, values))
                steps, values = means
                panel.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0, zorder=1)
            marker = "o" if len(steps) <= _MAX_DOTS else None
            # A point at the end of an axis, as of the last step, is drawn whole.
            style |= {"linewidth": 1.4, "marker": marker, "markersize": 3.5, "zorder": 2 + number}
            panel.plot(steps, values, clip_on=False, **style)
    panels[-1].set_xlabel("step")
    whole_ticks(panels[-1])
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return panels


def _mark_epochs(panels: Sequence[Axes], record: RunRecord) -> None:
    """Shade every other epoch, or every other 2, 5, 10 … of them, and write their numbers above the plots."""
    # The smallest stride of epochs for which the labels have room.
    steps = record.steps_per_epoch
    num_epochs = max(1, math.ceil(max(row.step for row in record.metrics) / steps))
    sizes = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    stride = next(size for size in sizes if num_epochs <= size * _MAX_EPOCH_LABELS)  # in epochs

    for panel in panels:
        panel.set_xlim(0, num_epochs * steps)
        for first in range(stride, num_epochs, 2 * stride):
            last = min(first + stride, num_epochs)
            panel.axvspan(first * steps, last * steps, color=LIGHT, linewidth=0, zorder=0)

    # The epochs have an axis of their own, above the plot.
    to_epoch, to_step = (lambda step: np.divide(step, steps)), (lambda epoch: np.multiply(epoch, steps))
    top = panels[0].secondary_xaxis("top", functions=(to_epoch, to_step))
    top.set_ticks(range(stride, num_epochs + 1, stride))
    top.set_xlabel("epoch", color=GREY)
    top.tick_params(length=0, colors=GREY)
    top.spines["top"].set_visible(False)
