"""A scaling study as people see it: a page for the terminal, and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def study_page(study: StudyResult, picture: str | None = None) -> RenderableType:
    """The whole page. For a study that was stopped: the sizes that are finished, and how to continue."""
    compared = study.summary()
    parts: list[RenderableType] = [_table(compared)]
    if study.histories:
        parts += [_plots(study, compared), Text()]
    if len(study.histories) > 1:
        parts += [Text(line, style="bold") for line in _findings(compared)]
    remaining = [f"{size['run']} is {size['status']}" for size in compared["sizes"] if size["status"] != "finished"]
    if remaining:
        text = f"{', '.join(remaining)}; run the same command again to continue the study."
        parts += [Text(text, style="yellow")]
    measured = [size for size in compared["sizes"] if size["test_accuracy"] is not None]
    best = max(measured, key=lambda size: size["test_accuracy"])["run"] if measured else None
    return Group(*parts, *conclusion(study.name, best, "", study.storage, picture))


def study_figure(study: StudyResult) -> Figure:
    """Both plots, of the sizes that are finished."""
    compared = study.summary()
    figure = titled_figure(study.name, 9, 9)
    over_time, over_workers = figure.subplots(2)
    for panel, gain in ((over_time, "time_gain"), (over_workers, "images_per_s_gain")):
        plain_axes(panel)
        panel.margins(x=0.01)
        if compared[gain] is not None:
            title = f"{compared[gain]:+.0%} per doubling of the workers"
            panel.set_title(title, loc="right", fontsize=10, color=GREY)
    _draw_accuracies(over_time, study.histories, compared)
    if sizes := [size for size in compared["sizes"] if size["images_per_s"]]:
        _draw_speeds(over_workers, sizes)
    return figure


def _table(compared: Mapping[str, Any]) -> RenderableType:
    target, sizes = compared["target_accuracy"], compared["sizes"]
    times = [size["seconds_to_target"] for size in sizes]
    return rows_table(
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


def _findings(compared: Mapping[str, Any]) -> Iterator[str]:
    """What more workers gain, and how far the final accuracies lie apart, as far as it is known."""
    time = f"time to an accuracy of {compared['target_accuracy'] or 0:.3f}"
    gains = {"images/s": compared["images_per_s_gain"], time: compared["time_gain"]}
    if known := [f"{name} {gain:+.0%}" for name, gain in gains.items() if gain is not None]:
        yield f"Per doubling of the workers: {', '.join(known)}."
    if (spread := compared["accuracy_spread"]) is not None:
        yield f"The final accuracies lie within {100 * spread:.1f} percentage points."


def _draw_accuracies(panel: Axes, histories: Mapping[int, Sequence[MetricRow]], compared: Mapping[str, Any]) -> None:
    """A line for each size, and a pale one of the training batches; the legend says when each reached the target."""
    times = {size["workers"]: size["seconds_to_target"] for size in compared["sizes"]}
    unit, unit_s = _time_unit(max((size["seconds"] or 0 for size in compared["sizes"]), default=0))
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
    """Images/s over the workers, both axes in doublings, with the gain of each size over the one before."""
    workers, speeds = [size["workers"] for size in sizes], [size["images_per_s"] for size in sizes]
    linear = [speeds[0] * size / workers[0] for size in workers]
    panel.plot(workers, linear, color=GREY, linewidth=0.8, linestyle="--", label="linear scaling")
    panel.plot(workers, speeds, color=BLUE, marker="o", markersize=5, label="measured (gain per doubling)")
    for size in sizes:
        gain = "" if size["images_per_s_gain"] is None else f" ({size['images_per_s_gain']:+.0%})"
        text = f"{size['images_per_s']:,.0f}{gain}"
        point = (size["workers"], size["images_per_s"])
        panel.annotate(text, point, (6, -16), textcoords="offset points", color=BLUE)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(workers, [str(size) for size in workers])
    panel.set_yticks(linear, [f"{speed:,.0f}" for speed in linear])
    panel.minorticks_off()
    panel.margins(x=0.13, y=0.15)
    panel.legend(loc="upper left", frameon=False)
    panel.set_xlabel("workers")
    panel.set_ylabel("images/s")


def _time_unit(longest_s: float) -> tuple[str, int]:
    """The largest unit of which ``longest_s`` has at least three, and its seconds."""
    units = (("hours", 3600), ("minutes", 60), ("seconds", 1))
    return next((unit for unit in units if longest_s >= 3 * unit[1]), units[-1])
