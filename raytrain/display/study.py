"""A scaling study as people see it: a page for the terminal, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.console import UNKNOWN, format_count, format_duration, format_optional, run_styles
from raytrain.display.curves import BLUE, GREY, plain_axes, side_by_side, titled_figure
from raytrain.display.run_tables import rows_table
from raytrain.display.sweep import conclusion
from raytrain.experiments.study import curve
from raytrain.runs.metric_row import MetricRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from raytrain.experiments.study import StudyResult

_HEIGHT = 10  # lines of a plot
_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def study_page(study: StudyResult, picture: str | None = None) -> RenderableType:
    """Return the whole page. For a study that was stopped: the sizes that are finished, and how to continue."""
    compared = study.summary()
    target, sizes = compared["target_accuracy"], compared["sizes"]

    # A row for each size.
    times = [size["seconds_to_target"] for size in sizes]
    table = rows_table(
        ("workers", [str(size["workers"]) for size in sizes]),
        ("batch", [f"{size['batch_size']:,}" for size in sizes]),
        ("rate", [f"{size['learning_rate']:g}" for size in sizes]),
        ("images/s", [format_optional(size["images_per_s"], ",.0f") for size in sizes]),
        ("gain per\ndoubling", [format_optional(size["images_per_s_gain"], "+.0%") for size in sizes]),
        (
            "time to\naccuracy" if target is None else f"time to\n{target:.3f}",
            [UNKNOWN if time is None else format_duration(time) for time in times],
        ),
        ("gain per\ndoubling", [format_optional(size["time_gain"], "+.0%") for size in sizes]),
        ("last test\naccuracy", [format_optional(size["test_accuracy"], ".4f") for size in sizes]),
    )
    parts: list[RenderableType] = [table]
    if study.histories:
        parts += [_plots(study, sizes), Text()]

    # What more workers gain, and how far the final accuracies lie apart, as far as it is known.
    if len(study.histories) > 1:
        gains = {
            "images/s": compared["images_per_s_gain"],
            f"time to an accuracy of {target or 0:.3f}": compared["time_gain"],
        }
        if known := [f"{name} {gain:+.0%}" for name, gain in gains.items() if gain is not None]:
            parts.append(Text(f"Per doubling of the workers: {', '.join(known)}.", style="bold"))
        if (spread := compared["accuracy_spread"]) is not None:
            sentence = f"The final accuracies lie within {100 * spread:.1f} percentage points."
            parts.append(Text(sentence, style="bold"))

    # What is left to do.
    remaining = [f"{size['run']} is {size['status']}" for size in sizes if size["status"] != "finished"]
    if remaining:
        text = f"{', '.join(remaining)}; run the same command again to continue the study."
        parts.append(Text(text, style="yellow"))

    # The best size, and commands that use it.
    measured = [size for size in sizes if size["test_accuracy"] is not None]
    best = max(measured, key=lambda size: size["test_accuracy"])["run"] if measured else None
    return Group(*parts, *conclusion(study.name, best, "", study.storage, picture))


def _plots(study: StudyResult, sizes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return accuracy over the time of training, a line for each size, and images/s over the workers."""
    # On the left time, on the right machines: with linear scaling the measured dots lie on the line.
    accuracies: list[Series] = []
    for (workers, rows), style in zip(study.histories.items(), run_styles(list(study.histories)), strict=True):
        tested = curve(rows, "evaluation")
        accuracies.append(Series(f"on {workers}", style, tested.seconds, tested.accuracies))
    workers, speeds, linear = _speeds(sizes)
    lines = [Series("linear", "dim", workers, linear), Series("measured", "cyan", workers, speeds, mark="●")]
    return side_by_side(
        Plot("accuracy", accuracies, _HEIGHT, last_x="{:,.0f} s of training", legend="below"),
        Plot("images/s", lines, _HEIGHT, last_x="{:,.0f} workers", legend="below"),
    )


def _speeds(sizes: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], list[float]]:
    """Return the workers of each size whose speed is known, its images/s, and those that linear scaling would give."""
    known = [size for size in sizes if size["images_per_s"]]
    workers, speeds = [size["workers"] for size in known], [size["images_per_s"] for size in known]
    return workers, speeds, [speeds[0] * size / workers[0] for size in workers]


def study_figure(study: StudyResult) -> Figure:
    """Return both plots as a figure, of the sizes that are finished."""
    compared = study.summary()
    figure = titled_figure(study.name, 9, 9)
    over_time, over_workers = figure.subplots(2)

    # Each panel says at its upper right what a doubling of the workers gains.
    for panel, gain in ((over_time, "time_gain"), (over_workers, "images_per_s_gain")):
        plain_axes(panel)
        panel.margins(x=0.01)
        if compared[gain] is not None:
            title = f"{compared[gain]:+.0%} per doubling of the workers"
            panel.set_title(title, loc="right", fontsize=10, color=GREY)
    _draw_accuracies(over_time, study.histories, compared)
    if any(size["images_per_s"] for size in compared["sizes"]):
        _draw_speeds(over_workers, compared["sizes"])
    return figure


def _draw_accuracies(panel: Axes, histories: Mapping[int, Sequence[MetricRow]], compared: Mapping[str, Any]) -> None:
    """Draw a line for each size, and a pale one of its training batches, over the time of training."""
    # The time is in the largest unit of which the longest run has at least three.
    longest_s = max((size["seconds"] or 0 for size in compared["sizes"]), default=0)
    unit, unit_s = next((unit for unit in _UNITS if longest_s >= 3 * unit[1]), _UNITS[-1])

    # The legend says when each size reached the target.
    times = {size["workers"]: size["seconds_to_target"] for size in compared["sizes"]}
    for number, (workers, rows) in enumerate(histories.items()):
        colour = f"C{number % 10}"
        trained, tested = curve(rows, "step"), curve(rows, "evaluation")
        time = "" if times[workers] is None else f"  {format_duration(times[workers])}"
        label = format_count(workers, "worker") + time
        panel.plot(np.divide(trained.seconds, unit_s), trained.accuracies, color=colour, alpha=0.25, linewidth=0.8)
        panel.plot(
            np.divide(tested.seconds, unit_s), tested.accuracies, color=colour, label=label, marker="o", markersize=3
        )
    target = compared["target_accuracy"]
    if target is not None:
        panel.axhline(target, color=GREY, linewidth=0.8, linestyle="--")
    title = "" if target is None else f"time to {target:.3f}"
    panel.legend(title=title, alignment="left", loc="lower right", frameon=False)
    panel.set_xlim(left=0)
    panel.set_xlabel(f"{unit} of training")
    panel.set_ylabel("test accuracy (pale: training batches)")


def _draw_speeds(panel: Axes, sizes: Sequence[Mapping[str, Any]]) -> None:
    """Draw images/s over the workers, both axes in doublings, with the gain of each size over the one before."""
    workers, speeds, linear = _speeds(sizes)
    panel.plot(workers, linear, color=GREY, linewidth=0.8, linestyle="--", label="linear scaling")
    panel.plot(workers, speeds, color=BLUE, marker="o", markersize=5, label="measured (gain per doubling)")
    for size in sizes:
        if size["images_per_s"]:
            gain = "" if size["images_per_s_gain"] is None else f" ({size['images_per_s_gain']:+.0%})"
            text = f"{size['images_per_s']:,.0f}{gain}"
            point = (size["workers"], size["images_per_s"])
            panel.annotate(text, point, (6, -16), textcoords="offset points", color=BLUE)

    # The ticks are the sizes themselves, and where linear scaling would have them.
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(workers, [str(size) for size in workers])
    panel.set_yticks(linear, [f"{speed:,.0f}" for speed in linear])
    panel.minorticks_off()
    panel.margins(x=0.13, y=0.15)
    panel.legend(loc="upper left", frameon=False)
    panel.set_xlabel("workers")
    panel.set_ylabel("images/s")
