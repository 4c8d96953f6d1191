"""A scaling study in the terminal: a table of its sizes, two plots, and the gain per doubling of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.curve_plots import side_by_side
from raytrain.display.formatting import UNKNOWN, format_duration, format_optional
from raytrain.display.styles import run_styles
from raytrain.experiments.scaling import curve

if TYPE_CHECKING:
    from raytrain.experiments.study import StudyResult

_HEIGHT = 10  # lines of a plot


def study_page(study: StudyResult) -> RenderableType:
    """The whole page. For a study that was stopped: the sizes that are finished, and how to continue."""
    compared = study.summary()
    parts: list[RenderableType] = [_table(compared)]
    if study.histories:
        parts += [_plots(study, compared), Text()]
    if len(study.histories) > 1:
        parts += [Text(line, style="bold") for line in (_gains(compared), _spread(compared)) if line]
    remaining = [f"{size['run']} is {size['status']}" for size in compared["sizes"] if size["status"] != "finished"]
    if remaining:
        text = f"{', '.join(remaining)}; run the same command again to continue the study."
        parts += [Text(text, style="yellow")]
    return Group(*parts)


def _table(compared: Mapping[str, Any]) -> RenderableType:
    target = compared["target_accuracy"]
    to_target = "time to\naccuracy" if target is None else f"time to\n{target:.3f}"
    gain = "gain per\ndoubling"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("workers", "batch", "rate", "images/s", gain, to_target, gain, "test\naccuracy"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for size in compared["sizes"]:
        table.add_row(
            str(size["workers"]),
            f"{size['batch_size']:,}",
            f"{size['learning_rate']:g}",
            format_optional(size["images_per_s"], ",.0f"),
            format_optional(size["images_per_s_gain"], "+.0%"),
            UNKNOWN if size["seconds_to_target"] is None else format_duration(size["seconds_to_target"]),
            format_optional(size["time_gain"], "+.0%"),
            format_optional(size["test_accuracy"], ".4f"),
        )
    return table


def _plots(study: StudyResult, compared: Mapping[str, Any]) -> RenderableType:
    """Accuracy over the time of training, a line for each size; images/s over the workers, beside linear scaling."""
    lines: list[Series] = []
    for (workers, rows), style in zip(study.histories.items(), run_styles(list(study.histories)), strict=True):
        tested = curve(rows, "evaluation")
        lines.append(Series(f"on {workers}", style, tested.seconds, tested.accuracies))
    sizes = [size for size in compared["sizes"] if size["images_per_s"]]
    workers, speeds = [size["workers"] for size in sizes], [size["images_per_s"] for size in sizes]
    linear = Series("linear", "dim", workers, [speeds[0] * size / workers[0] for size in workers])
    measured = Series("measured", "cyan", workers, speeds, mark="●")
    return side_by_side(
        Plot("accuracy", lines, _HEIGHT, last_x="{:,.0f} s of training", legend="below"),
        Plot("images/s", [linear, measured], _HEIGHT, last_x="{:,.0f} workers", legend="below"),
    )


def _gains(compared: Mapping[str, Any]) -> str:
    target = compared["target_accuracy"]
    time = f"time to an accuracy of {target or 0:.3f}"
    gains = {"images/s": compared["images_per_s_gain"], time: compared["time_gain"]}
    known = [f"{name} {gain:+.0%}" for name, gain in gains.items() if gain is not None]
    return f"Per doubling of the workers: {', '.join(known)}." if known else ""


def _spread(compared: Mapping[str, Any]) -> str:
    spread = compared["accuracy_spread"]
    return "" if spread is None else f"The final accuracies lie within {100 * spread:.1f} percentage points."
