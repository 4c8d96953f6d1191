"""Pictures: the curves of a run, the curves of several, a study, a confusion matrix. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raytrain.display.tables import heading
from raytrain.display.terminal import duration
from raytrain.errors import UsageError
from raytrain.experiments.scaling import curve
from raytrain.runs.history import Row, steps_per_epoch
from raytrain.storage.output_file import check_output, write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from raytrain.experiments.study import StudyResult
    from raytrain.runs.records import RunRecord

_DPI = 120
_GREY, _LIGHT = "#666666", "#f1f3f6"
_TRAIN, _TEST = "#1f6fb4", "#e8710a"
_NUM_BANDS = 20
_NUM_DOTS = 60
_NUM_COUNTED = 30
_MIN_SIDE, _MAX_SIDE = 5.5, 16.0  # inches


def save(figure: Figure, output: str) -> None:
    """Write ``figure`` as a PNG file, or ``s3://`` object, whose name ends so."""
    check_output(output, (".png",), "--png")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    write_output(output, content.getvalue())


def curves(record: RunRecord) -> Figure:
    """Loss, accuracy and learning rate of a run over its steps, with its epochs as bands; UsageError where it has no history."""
    _check_history([record])
    figure, panels = _panels(["loss", "accuracy", "learning rate"], (9, 8.5))
    for panel, quantity in zip(panels, ("loss", "accuracy", "learning_rate"), strict=True):
        for kind, label, colour in (("step", "train {:.3f}", _TRAIN), ("evaluation", "test {:.3f}", _TEST)):
            _draw(panel, record.metrics, kind, quantity, label, color=colour, zorder=3 if kind == "evaluation" else 2)
        if quantity != "learning_rate" and panel.lines:
            panel.legend(loc="lower right" if quantity == "accuracy" else "upper right", frameon=False)
    _mark_epochs(panels, record.metrics)
    figure.suptitle(f"{record.name}    {heading(record)}", x=0.01, ha="left", weight="bold")
    return figure


def comparison(records: Sequence[RunRecord]) -> Figure:
    """Training loss and test accuracy of several runs over their steps; UsageError where one has no history."""
    _check_history(records)
    figure, panels = _panels(["training loss", "test accuracy"], (9, 7.5))
    for number, record in enumerate(records):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        _draw(panels[0], record.metrics, "step", "loss", record.name, **style)
        _draw(panels[1], record.metrics, "evaluation", "accuracy", record.name, **style)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    return figure


def scaling(study: StudyResult) -> Figure:
    """Accuracy over the time of training for each size of a study that is finished, and images/s over the workers."""
    from matplotlib.figure import Figure

    compared = study.summary()
    figure = Figure(figsize=(9, 9), layout="constrained")
    over_time, over_workers = figure.subplots(2)
    for panel, gained in ((over_time, "time_gain"), (over_workers, "images_per_s_gain")):
        _clear(panel)
        if compared[gained] is not None:
            panel.set_title(f"{compared[gained]:+.0%} a doubling of the workers", loc="right", fontsize=10, color=_GREY)
    _draw_accuracies(over_time, study.histories, compared)
    if sizes := [size for size in compared["sizes"] if size["images_per_s"]]:
        _draw_speeds(over_workers, sizes)
    figure.suptitle(study.name, x=0.01, ha="left", weight="bold")
    return figure


def confusion(evaluation: Mapping[str, Any]) -> Figure:
    """The confusion matrix of what :func:`raytrain.evaluate` returned: true classes as rows, answers as columns.

    Right answers are blue and wrong ones orange, the darker the larger their part of the true class. Few classes show their counts
    and, on the right, their accuracy.
    """
    from matplotlib.figure import Figure

    matrix, classes = np.array(evaluation["confusion_matrix"]), evaluation["classes"]
    side = min(_MAX_SIDE, max(_MIN_SIDE, 3.0 + 0.45 * len(classes)))
    figure = Figure(figsize=(side + 0.5, side), layout="constrained")
    axes = figure.add_subplot()
    parts = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)  # of the true class, (C, C)
    _shade(axes, parts)
    _name_classes(axes, classes, cell_points=(side - 2) * 72 / len(classes))
    if len(classes) <= _NUM_COUNTED:
        _count(axes, matrix, parts)
        _tell_accuracies(axes, [row["accuracy"] for row in evaluation["per_class"]])
    accuracy = evaluation["accuracy"]
    right = "" if accuracy is None else f"{accuracy:.2%} of "
    axes.set_title(f"{evaluation['run']}    {right}{evaluation['images']:,} images", loc="left", weight="bold", pad=12)
    return figure


def _check_history(records: Sequence[RunRecord]) -> None:
    for record in records:
        if not record.metrics:
            raise UsageError(f"Run {record.name!r} has no history yet, and so no curves; its first row comes after --log-every steps.")


def _panels(titles: Sequence[str], size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """One plot below the other, over the same steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=size, layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(titles), sharex=True))
    for panel, title in zip(panels, titles, strict=True):
        _clear(panel)
        panel.set_ylabel(title)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure, panels


def _clear(panel: Axes) -> None:
    """Leave of a plot's frame what helps to read it."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(x=0.01)
    panel.locator_params(axis="y", nbins=6)


def _draw(panel: Axes, rows: Sequence[Row], kind: str, quantity: str, label: str, **style: Any) -> None:
    """A line through the rows of one kind, with dots where they are few; ``label`` may take the last value."""
    points = [(row["step"], row[quantity]) for row in rows if row["kind"] == kind and row.get(quantity) is not None]
    if points:
        steps, values = zip(*points, strict=True)
        dots = len(points) == 1 or (kind == "evaluation" and len(points) <= _NUM_DOTS)
        panel.plot(steps, values, label=label.format(values[-1]), linewidth=1.4, marker="o" if dots else None, markersize=3.5, **style)


def _mark_epochs(panels: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Every other epoch is shaded, or every other ten, and their numbers stand above."""
    steps = steps_per_epoch(rows)
    num_epochs = math.ceil(max(row["step"] for row in rows) / steps)
    every = next(size for size in _round_numbers() if num_epochs <= size * _NUM_BANDS)
    for panel in panels:
        panel.set_xlim(0, num_epochs * steps)
        for first in range(every, num_epochs, 2 * every):
            panel.axvspan(first * steps, min(first + every, num_epochs) * steps, color=_LIGHT, linewidth=0, zorder=0)
    top = panels[0].secondary_xaxis("top", functions=(lambda step: np.divide(step, steps), lambda epoch: np.multiply(epoch, steps)))
    top.set_ticks(range(every, num_epochs + 1, every))
    top.set_xlabel("epoch", color=_GREY)
    top.tick_params(length=0, colors=_GREY)
    top.spines["top"].set_visible(False)


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, 100 …"""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _draw_accuracies(panel: Axes, histories: Mapping[int, Sequence[Row]], compared: Mapping[str, Any]) -> None:
    """For each size a line, and behind it a pale one of the training batches; the legend tells when each reached the target."""
    times = {size["workers"]: size["seconds_to_target"] for size in compared["sizes"]}
    unit, unit_s = _time_unit(max((size["seconds"] or 0 for size in compared["sizes"]), default=0))
    for number, (workers, rows) in enumerate(histories.items()):
        colour = f"C{number % 10}"
        trained, tested = curve(rows, "step"), curve(rows, "evaluation")
        label = _workers(workers) + ("" if times[workers] is None else f"  {duration(times[workers])}")
        panel.plot(np.divide(trained.seconds, unit_s), trained.accuracies, color=colour, alpha=0.25, linewidth=0.8)
        panel.plot(np.divide(tested.seconds, unit_s), tested.accuracies, color=colour, label=label, marker="o", markersize=3)
    target = compared["target_accuracy"]
    if target is not None:
        panel.axhline(target, color=_GREY, linewidth=0.8, linestyle="--")
    panel.legend(title="" if target is None else f"time to {target:.3f}", alignment="left", loc="lower right", frameon=False)
    panel.set_xlim(left=0)
    panel.set_xlabel(f"{unit} of training")
    panel.set_ylabel("test accuracy (pale: training batches)")


def _draw_speeds(panel: Axes, sizes: Sequence[Mapping[str, Any]]) -> None:
    """Images/s over the workers, both by doublings, with the gain for each since the size before, and what would be in proportion."""
    workers, speeds = [size["workers"] for size in sizes], [size["images_per_s"] for size in sizes]
    in_proportion = [speeds[0] * size / workers[0] for size in workers]
    panel.plot(workers, in_proportion, color=_GREY, linewidth=0.8, linestyle="--", label="in proportion")
    panel.plot(workers, speeds, color=_TRAIN, marker="o", markersize=5, label="measured (gain a doubling)")
    for size in sizes:
        gain = "" if size["images_per_s_gain"] is None else f" ({size['images_per_s_gain']:+.0%})"
        text = f"{size['images_per_s']:,.0f}{gain}"
        panel.annotate(text, (size["workers"], size["images_per_s"]), (6, -16), textcoords="offset points", color=_TRAIN)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(workers, [str(size) for size in workers])
    panel.set_yticks(in_proportion, [f"{speed:,.0f}" for speed in in_proportion])
    panel.minorticks_off()
    panel.margins(x=0.13, y=0.15)
    panel.legend(loc="upper left", frameon=False)
    panel.set_xlabel("workers")
    panel.set_ylabel("images/s")


def _time_unit(longest_s: float) -> tuple[str, int]:
    """A unit that ``longest_s`` is some of, and its seconds."""
    units = (("hours", 3600), ("minutes", 60), ("seconds", 1))
    return next((unit for unit in units if longest_s >= 3 * unit[1]), units[-1])


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _shade(axes: Axes, parts: np.ndarray[Any, Any]) -> None:
    from matplotlib.colors import PowerNorm

    right = np.eye(len(parts), dtype=bool)
    for colours, hidden in (("Blues", ~right), ("Oranges", right)):
        # Not in proportion: what is rare must be seen beside what is common.
        shown = np.ma.masked_array(parts, hidden | (parts == 0))
        axes.imshow(shown, cmap=colours, norm=PowerNorm(0.7, 0, 1), interpolation="nearest")


def _name_classes(axes: Axes, classes: Sequence[str], cell_points: float) -> None:
    """The classes along both sides, as many of them as can be read."""
    size = min(10.0, max(5.5, 0.7 * cell_points))
    places = range(0, len(classes), math.ceil(1.2 * size / cell_points))
    names = [classes[place] for place in places]
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_yticks(places, names, fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#bbbbbb")
    axes.set_xlabel("answered class", labelpad=10)
    axes.set_ylabel("true class", labelpad=10)


def _count(axes: Axes, matrix: np.ndarray[Any, Any], parts: np.ndarray[Any, Any]) -> None:
    for row, column in np.argwhere(matrix):
        colour = "white" if parts[row, column] > 0.4 else "#333333"
        axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", fontsize=8.5, color=colour)
    edges = np.arange(len(matrix) - 1) + 0.5
    axes.hlines(edges, -0.5, len(matrix) - 0.5, color="#e4e4e4", linewidth=0.5)
    axes.vlines(edges, -0.5, len(matrix) - 0.5, color="#e4e4e4", linewidth=0.5)


def _tell_accuracies(axes: Axes, accuracies: Sequence[float | None]) -> None:
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(accuracies)), ["–" if accuracy is None else f"{accuracy:.1%}" for accuracy in accuracies], fontsize=9)
    right.tick_params(length=0, colors=_GREY)
    right.spines["right"].set_visible(False)
    right.set_ylabel("right answers", color=_GREY, labelpad=8)
