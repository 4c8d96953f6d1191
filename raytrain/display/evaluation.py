"""Accuracy, classes and confusions, as tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.console import format_count, format_optional, key_value_table
from raytrain.display.curves import GREY
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from raytrain.inference.classification_metrics import ClassScore
    from raytrain.inference.evaluate import EvaluationResult
    from raytrain.inference.label_predictions import LabelEvaluation

_NUM_CLASSES_SHOWN = 20
_BAR_WIDTH = 16


def evaluation_page(result: EvaluationResult, picture: str | None = None) -> RenderableType:
    """The metrics, the classes from the worst on, the most frequent confusions, and the file ``picture``."""
    tables = Columns([_classes(result.per_class), _confusions(result)], padding=(0, 4))
    return Group(key_value_table({**result.summary(), "picture": picture}), *_trained_on(result), Text(), tables)


def label_evaluation_page(result: LabelEvaluation) -> RenderableType:
    """The metrics and the classes, from the worst on, of images that may have several classes each."""
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "average precision", "threshold", "precision", "recall"):
        table.add_column(name, justify="right")
    worst_first = sorted(result.per_class, key=lambda score: _or_infinite(score.average_precision))
    for score in worst_first[:_NUM_CLASSES_SHOWN]:
        values = (score.average_precision, score.threshold, score.precision, score.recall)
        cells = [format_optional(value, ".4f") for value in values]
        table.add_row(Text(one_line(score.name)), f"{score.images:,}", *cells)
    return Group(key_value_table(result.summary()), *_trained_on(result), table, *_more(len(result.per_class)))


def _trained_on(result: EvaluationResult | LabelEvaluation) -> Iterable[RenderableType]:
    """A warning if the images are not new to the network."""
    if result.trained_on:
        least = "" if result.all_compared else "At least "
        total = format_count(result.images + result.skipped, "image")
        text = f"{least}{result.trained_on:,} of these {total} are training images of the run; new ones are harder."
        yield Text(f"\n{text}", style="yellow")


def _classes(scores: Sequence[ClassScore]) -> RenderableType:
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "correct", "accuracy"):
        table.add_column(name, justify="right")
    table.add_column(width=_BAR_WIDTH)
    worst_first = sorted(scores, key=lambda score: _or_infinite(score.accuracy))
    for score in worst_first[:_NUM_CLASSES_SHOWN]:
        bar = Bar(1, 0, score.accuracy or 0, width=_BAR_WIDTH, color="cyan")
        table.add_row(
            Text(one_line(score.name)),
            f"{score.images:,}",
            f"{score.right:,}",
            format_optional(score.accuracy, ".4f"),
            bar,
        )
    return Group(table, *_more(len(scores)))


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _more(num_classes: int) -> list[RenderableType]:
    num_more = num_classes - _NUM_CLASSES_SHOWN
    return [Text(f" and {num_more:,} better classes; --json lists them all", style="dim")] if num_more > 0 else []


def _confusions(result: EvaluationResult) -> RenderableType:
    if not result.confusions:
        return Text("\nNo image was misclassified.")
    table = Table("true class", "predicted", box=box.SIMPLE_HEAD)
    table.add_column("images", justify="right")
    table.add_column("of the class", justify="right")
    sizes = {score.name: score.images for score in result.per_class}
    for confusion in result.confusions:
        fraction = confusion.images / sizes[confusion.truth]
        table.add_row(
            Text(one_line(confusion.truth)),
            Text(one_line(confusion.answer)),
            f"{confusion.images:,}",
            f"{fraction:.1%}",
        )
    return table


_MAX_CLASSES_COUNTED = 30
_MIN_SIDE, _MAX_SIDE = 5.5, 16.0  # inches


def confusion_figure(result: EvaluationResult) -> Figure:
    """The confusion matrix: true classes as rows, predicted ones as columns.

    Correct predictions are blue and wrong ones orange; the darker a cell, the larger its fraction of the true class. Up
    to 30 classes, the cells have counts, and the accuracy of each class is on the right.
    """
    from matplotlib.figure import Figure

    matrix, classes = result.confusion_matrix, result.classes
    side = min(_MAX_SIDE, max(_MIN_SIDE, 3.0 + 0.45 * len(classes)))
    figure = Figure(figsize=(side + 0.5, side), layout="constrained")
    axes = figure.add_subplot()
    fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)  # of the true class, (C, C)
    _shade(axes, fractions)
    _name_classes(axes, classes, cell_points=(side - 2) * 72 / len(classes))
    if len(classes) <= _MAX_CLASSES_COUNTED:
        _write_counts(axes, matrix, fractions)
        _write_accuracies(axes, [score.accuracy for score in result.per_class])
    correct = "" if result.accuracy is None else f"{result.accuracy:.2%} of "
    title = f"{result.run}    {correct}{result.images:,} images"
    axes.set_title(title, loc="left", weight="bold", pad=12)
    return figure


def _shade(axes: Axes, fractions: NDArray[np.float64]) -> None:
    from matplotlib.colors import PowerNorm

    diagonal = np.eye(len(fractions), dtype=bool)
    for colours, hidden in (("Blues", ~diagonal), ("Oranges", diagonal)):
        # Not linear: rare confusions must be visible beside frequent ones.
        shown = np.ma.masked_array(fractions, hidden | (fractions == 0))
        axes.imshow(shown, cmap=colours, norm=PowerNorm(0.7, 0, 1), interpolation="nearest")


def _name_classes(axes: Axes, classes: Sequence[str], cell_points: float) -> None:
    """Write the classes along both sides, as many of them as can be read. A cell is ``cell_points`` wide."""
    size = min(10.0, max(5.5, 0.7 * cell_points))
    places = range(0, len(classes), math.ceil(1.2 * size / cell_points))
    names = [one_line(classes[place]) for place in places]
    axes.set_xticks(places, names, rotation=90, fontsize=size, parse_math=False)  # a $ is a $
    axes.set_yticks(places, names, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#bbbbbb")
    axes.set_xlabel("predicted class", labelpad=10)
    axes.set_ylabel("true class", labelpad=10)


def _write_counts(axes: Axes, matrix: NDArray[np.int64], fractions: NDArray[np.float64]) -> None:
    for row, column in np.argwhere(matrix):
        colour = "white" if fractions[row, column] > 0.4 else "#333333"
        axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", fontsize=8.5, color=colour)
    edges = np.arange(len(matrix) - 1) + 0.5
    axes.hlines(edges, -0.5, len(matrix) - 0.5, color="#e4e4e4", linewidth=0.5)
    axes.vlines(edges, -0.5, len(matrix) - 0.5, color="#e4e4e4", linewidth=0.5)


def _write_accuracies(axes: Axes, accuracies: Sequence[float | None]) -> None:
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(accuracies)), [format_optional(value, ".1%") for value in accuracies], fontsize=9)
    right.tick_params(length=0, colors=GREY)
    right.spines["right"].set_visible(False)
    right.set_ylabel("accuracy", color=GREY, labelpad=8)
