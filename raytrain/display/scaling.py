"""A sweep over numbers of workers in the terminal and as a figure: metric over time, images/s over workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.console import UNKNOWN, format_duration, format_optional, metric_label, run_styles
from raytrain.display.curves import GREY, plain_axes, side_by_side, titled_figure
from raytrain.display.run_tables import rows_table
from raytrain.errors import format_count, option_name
from raytrain.experiments.scaling import Scaling, Size, curve
from raytrain.experiments.sweep_result import SweepResult
from raytrain.experiments.trials import as_typed, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 10  # lines of a plot
_MIN_UNITS = 3  # the time axis has the largest unit of which the longest run took at least as many
_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def scaling_table(result: SweepResult) -> Table:
    """Return a row for each trial of a sweep over numbers of workers, those with the same other options together."""
    rows = [(scaling, size) for scaling in result.scaling for size in scaling.sizes]
    sizes = [size for _, size in rows]
    metric, target = _metric(result), result.scaling[0].target
    times = [size.seconds_to_target for size in sizes]

    # First the varied options, then the number of workers, then what was measured with them.
    return rows_table(
        *(
            (Text(option_name(name).replace("-", "-\n")), [shown(scaling.values[name]) for scaling, _ in rows])
            for name in result.scaling[0].values
        ),
        ("workers", [str(size.workers) for size in sizes]),
        ("batch", [format_optional(size.batch_size, ",") for size in sizes]),
        ("rate", [format_optional(size.learning_rate, "g") for size in sizes]),
        ("images/s", [format_optional(size.images_per_s, ",.0f") for size in sizes]),
        ("gain per\ndoubling", [format_optional(size.images_per_s_gain, "+.0%") for size in sizes]),
        (
            f"time to\n{metric}" if target is None else f"time to\n{target:.3f}",
            [UNKNOWN if time is None else format_duration(time) for time in times],
        ),
        ("gain per\ndoubling", [format_optional(size.time_gain, "+.0%") for size in sizes]),
        (f"last\n{metric}", [format_optional(size.value, ".4f") for size in sizes]),
    )


def scaling_plots(result: SweepResult) -> RenderableType:
    """Return two plots of the finished trials: the metric over the time of training, and images/s over the workers.

    The first one has a line for each trial, the second one dots for each combination of the other options.
    """
    finished = _finished(result)
    measured_lines: list[Series] = []
    for (scaling, size), style in zip(finished, run_styles(finished), strict=True):
        evaluated = curve(result.histories[size.run], "evaluation", scaling.metric)
        label = " ".join(filter(None, [f"on {size.workers}", as_typed(scaling.values)]))
        measured_lines.append(Series(label, style, evaluated.seconds, evaluated.values))

    # The dots are the measured speeds. The line is linear scaling; several lines would be too many for a terminal.
    speeds: list[Series] = []
    for scaling, style in zip(result.scaling, run_styles(result.scaling), strict=True):
        workers, measured, linear = _speeds(scaling)
        if len(result.scaling) == 1:
            speeds.append(Series("linear", "dim", workers, linear))
        speeds.append(Series(as_typed(scaling.values) or "measured", style, workers, measured, mark="●"))
    return side_by_side(
        Plot(_metric(result), measured_lines, _HEIGHT, last_x="{:,.0f} s of training", legend="below"),
        Plot("images/s", speeds, _HEIGHT, last_x="{:,.0f} workers", legend="below"),
    )


def scaling_sentences(result: SweepResult) -> Iterator[Text]:
    """Yield sentences on the gain of more workers and on the spread of the final values, as far as they are known."""
    metric = _metric(result)
    article = "an" if metric[0] in "aeiou" else "a"
    for scaling in result.scaling:
        choice = f" with {as_typed(scaling.values)}" if scaling.values else ""
        gains = {
            "images/s": scaling.images_per_s_gain,
            f"time to {article} {metric} of {scaling.target or 0:.3f}": scaling.time_gain,
        }
        gain_texts = [f"{name} {gain:+.0%}" for name, gain in gains.items() if gain is not None]
        if gain_texts:
            yield Text(f"Per doubling of the workers{choice}: {', '.join(gain_texts)}.", style="bold")
        num_evaluated = sum(size.value is not None for size in scaling.sizes)
        if num_evaluated > 1 and scaling.spread is not None:
            if scaling.metric == "accuracy":
                spread = f"final accuracies{choice} lie within {100 * scaling.spread:.1f} percentage points"
            else:
                spread = f"final values of {metric}{choice} lie within {scaling.spread:.4f}"
            yield Text(f"The {spread}.", style="bold")


def scaling_figure(result: SweepResult) -> Figure:
    """Return a figure of the finished trials: the metric over the time of training, and images/s over the workers."""
    figure = titled_figure(result.name, 9, 9)
    over_time, over_workers = figure.subplots(2)

    # Each panel has the gain per doubling of the workers at its upper right, if there is only one.
    gains = (result.scaling[0].time_gain, result.scaling[0].images_per_s_gain)
    for panel, gain in zip((over_time, over_workers), gains, strict=True):
        plain_axes(panel)
        panel.margins(x=0.01)
        if gain is not None and len(result.scaling) == 1:
            title = f"{gain:+.0%} per doubling of the workers"
            panel.set_title(title, loc="right", fontsize=10, color=GREY)
    _draw_values(over_time, result)
    if any(size.images_per_s for _, size in _finished(result)):
        _draw_speeds(over_workers, result.scaling)
    return figure


def _draw_values(panel: Axes, result: SweepResult) -> None:
    """Draw the metric over the time of training: a line for each trial, and a pale one for its training batches."""
    # The unit of time: seconds for a run that took less than three minutes, and so on.
    finished = _finished(result)
    longest_s = max((size.seconds or 0 for _, size in finished), default=0)
    fitting = (unit for unit in _UNITS if longest_s >= _MIN_UNITS * unit[1])
    unit_name, unit_s = next(fitting, _UNITS[-1])

    # The legend says when each trial reached the target.
    for number, (scaling, size) in enumerate(finished):
        colour, rows = f"C{number % 10}", result.histories[size.run]
        trained, evaluated = (curve(rows, kind, scaling.metric) for kind in ("step", "evaluation"))
        time = "" if size.seconds_to_target is None else f" {format_duration(size.seconds_to_target)}"
        label = "  ".join(filter(None, [format_count(size.workers, "worker"), as_typed(scaling.values), time]))
        panel.plot(np.divide(trained.seconds, unit_s), trained.values, color=colour, alpha=0.25, linewidth=0.8)
        panel.plot(
            np.divide(evaluated.seconds, unit_s), evaluated.values, color=colour, label=label, marker="o", markersize=3
        )
    target = result.scaling[0].target
    if target is not None:
        panel.axhline(target, color=GREY, linewidth=0.8, linestyle="--")
    title = "" if target is None else f"time to {target:.3f}"
    panel.legend(title=title, alignment="left", loc="best", edgecolor="none")
    panel.set_xlim(left=0)
    panel.set_xlabel(f"{unit_name} of training")
    panel.set_ylabel(f"validation {_metric(result)} (pale: training batches)")


def _draw_speeds(panel: Axes, scalings: Sequence[Scaling]) -> None:
    """Draw images/s over the workers, both axes in doublings, with each size's gain since the next smaller one."""
    ticks: dict[int, float] = {}
    for number, scaling in enumerate(scalings):
        colour = f"C{number % 10}"
        workers, speeds, linear = _speeds(scaling)
        choice = as_typed(scaling.values) or "measured"
        linear_label = "linear scaling" if number == 0 else None  # once in the legend
        panel.plot(workers, linear, color=GREY, linewidth=0.8, linestyle="--", label=linear_label)
        panel.plot(workers, speeds, color=colour, marker="o", markersize=5, label=f"{choice} (gain per doubling)")
        ticks = {**dict(zip(workers, linear, strict=True)), **ticks}
        for size in scaling.sizes:
            if size.images_per_s:
                gain = "" if size.images_per_s_gain is None else f" ({size.images_per_s_gain:+.0%})"
                text, point = f"{size.images_per_s:,.0f}{gain}", (size.workers, size.images_per_s)
                panel.annotate(text, point, (6, -16), textcoords="offset points", color=colour)

    # The ticks are the numbers of workers, and the speeds that linear scaling would give them.
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(list(ticks), [str(workers) for workers in ticks])
    panel.set_yticks(list(ticks.values()), [f"{speed:,.0f}" for speed in ticks.values()])
    panel.minorticks_off()
    panel.margins(x=0.13, y=0.15)
    panel.legend(loc="upper left", frameon=False)
    panel.set_xlabel("workers")
    panel.set_ylabel("images/s")


def _metric(result: SweepResult) -> str:
    """Return the name of the metric by which trials are compared, as it is shown."""
    return metric_label(result.scaling[0].metric)


def _finished(result: SweepResult) -> list[tuple[Scaling, Size]]:
    """Return the trials whose history is known, each with the scaling to which it belongs."""
    return [(scaling, size) for scaling in result.scaling for size in scaling.sizes if size.run in result.histories]


def _speeds(scaling: Scaling) -> tuple[list[int], list[float], list[float]]:
    """Return workers, measured images/s and the images/s of linear scaling, for each size whose speed is known.

    Linear scaling starts at the measured speed of the smallest of these sizes.
    """
    workers = [size.workers for size in scaling.sizes if size.images_per_s]
    speeds = [size.images_per_s for size in scaling.sizes if size.images_per_s]
    return workers, speeds, [speeds[0] * number / workers[0] for number in workers]
