"""Loss and accuracy of one run or of several, as two braille plots side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.formatting import format_duration
from raytrain.display.styles import run_styles
from raytrain.runs.metric_row import Kind, MetricRow
from raytrain.runs.records import RunRecord

_COMPARED: tuple[tuple[str, Kind, str], ...] = (
    ("training loss", "step", "loss"),
    ("test accuracy", "evaluation", "accuracy"),
)


def curve_heading(epoch: int, elapsed_s: float, startup_s: float | None = None) -> str:
    """The title above a run's curves."""
    startup = "" if startup_s is None else f", {format_duration(startup_s)} of it start-up"
    return f"Epoch: {epoch}, Elapsed: {format_duration(elapsed_s)}{startup}"


def curve_plots(rows: Sequence[MetricRow], height: int = 8) -> RenderableType:
    """Loss and accuracy over the steps: a line for training, a dot for each evaluation."""
    loss, accuracy = (
        Plot(
            name,
            [
                _series("train", "cyan", rows, "step", name),
                _series("test", "yellow", rows, "evaluation", name, mark="●"),
            ],
            height,
        )
        for name in ("loss", "accuracy")
    )
    return side_by_side(loss, accuracy)


def comparison_plots(
    records: Sequence[RunRecord], labels: Sequence[str] | None = None, height: int = 10
) -> RenderableType:
    """Training loss and test accuracy over the steps, a line for each run, called by its name or its label."""
    styles, labels = run_styles(records), labels or [record.name for record in records]
    loss, accuracy = (
        Plot(
            title,
            [
                _series(label, style, record.metrics, kind, name)
                for label, record, style in zip(labels, records, styles, strict=True)
            ],
            height,
            legend="below",
        )
        for title, kind, name in _COMPARED
    )
    return side_by_side(loss, accuracy)


def side_by_side(left: Plot, right: Plot) -> RenderableType:
    """Two plots, each half as wide as the screen."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _series(
    label: str, style: str, rows: Sequence[MetricRow], kind: Kind, metric: str, mark: str | None = None
) -> Series:
    """One metric of the rows of one kind."""
    chosen = [row for row in rows if row.kind == kind]
    return Series(label, style, [row.step for row in chosen], [row.value(metric) for row in chosen], mark)
