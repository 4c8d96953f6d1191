"""A confusion matrix as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raytrain.display.formatting import format_optional
from raytrain.display.png import GREY
from raytrain.runs.printable import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from raytrain.inference.evaluate import EvaluationResult

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
