"""The picture of a confusion matrix, for trackers and for `evaluate`."""

# matplotlib is typed in parts only.
# pyright: basic
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raytrain.runs.redact import one_line
from raytrain.trackers.lettering import cut_middle, font_families

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_CLASSES = 1000  # along a side; with more, neighbours share a square
_MAX_CLASSES_COUNTED = 30
_MAX_LABEL = 30  # characters of a class beside the matrix
_MIN_INCHES, _MAX_INCHES = 5.5, 16.0


def confusion_matrix(counts: Mapping[tuple[int, int], int], classes: Sequence[str]) -> NDArray[np.uint8]:
    """Draw the confusion matrix with these ``counts`` by (label, prediction) as an image, (H, W, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    cells = np.array([(label, prediction, count) for (label, prediction), count in counts.items()], np.int64)
    canvas = FigureCanvasAgg(matrix_figure(cells, classes))
    canvas.draw()
    return np.array(canvas.buffer_rgba())[:, :, :3]


def matrix_figure(cells: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix: true classes as rows, predicted ones as columns.

    ``cells`` (n, 3) are the cells that are not empty: true class, predicted class, number of images. Correct
    predictions are blue and wrong ones orange; the darker a cell, the larger its fraction of the true class. With up to
    30 classes, the cells show counts. With more than 1,000 classes, neighbouring cells share a square, which has the
    colour of the darkest one.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    side = min(_MAX_INCHES, max(_MIN_INCHES, 3.0 + 0.45 * len(classes)))
    figure = Figure(figsize=(side + 0.5, side), layout="constrained")
    axes = figure.add_subplot()

    # The darkest correct and the darkest wrong prediction of each square, as fractions of their true class.
    truth, answers, counts = cells.reshape(-1, 3).T
    images = np.zeros(len(classes), np.int64)
    np.add.at(images, truth, counts)  # raises IndexError for a class that does not exist
    fractions = counts / np.maximum(images[truth], 1)  # (n,)
    square = max(1, math.ceil(len(classes) / _MAX_CLASSES))  # classes along a side
    num_squares = math.ceil(len(classes) / square)
    right, wrong = np.zeros((2, num_squares, num_squares))
    for shades, chosen in ((right, truth == answers), (wrong, truth != answers)):
        np.maximum.at(shades, (truth[chosen] // square, answers[chosen] // square), fractions[chosen])

    # Draw the shades: for each square the darker of its two, and none if both are 0. They are not linear, so that
    # rare confusions are visible beside frequent ones. Class i is centred on i, so the axes end half a class beyond.
    end = num_squares * square - 0.5
    for colours, shades, other_shades in (("Blues", right, wrong), ("Oranges", wrong, right)):
        shown = np.ma.masked_array(shades, (shades == 0) | (shades < other_shades))
        norm = PowerNorm(0.7, 0, 1)
        axes.imshow(shown, cmap=colours, norm=norm, interpolation="nearest", extent=(-0.5, end, end, -0.5))

    # Write the classes along both sides, as many as are readable.
    cell_points = (side - 2) * 72 / len(classes)
    size = min(10.0, max(5.5, 0.7 * cell_points))
    ticks = range(0, len(classes), math.ceil(1.2 * size / cell_points))
    names = [one_line(classes[tick]) for tick in ticks]
    labels = [cut_middle(name, _MAX_LABEL) for name in names]
    style = {"fontsize": size, "fontfamily": font_families(labels), "parse_math": False}  # a $ is a $
    axes.set_xticks(ticks, labels, rotation=90, **style)
    axes.set_yticks(ticks, labels, **style)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#bbbbbb")
    axes.set_xlabel("predicted class", labelpad=10)
    axes.set_ylabel("true class", labelpad=10)

    # Write the counts, with lines between the cells, if there is room.
    if len(classes) <= _MAX_CLASSES_COUNTED:
        for row, column, count, fraction in zip(truth, answers, counts, fractions, strict=True):
            colour = "white" if fraction > 0.4 else "#333333"
            axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8.5, color=colour)
        edges = np.arange(len(classes) - 1) + 0.5
        axes.hlines(edges, -0.5, end, color="#e4e4e4", linewidth=0.5)
        axes.vlines(edges, -0.5, end, color="#e4e4e4", linewidth=0.5)
    return figure
