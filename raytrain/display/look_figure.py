"""The first training images of a run as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain.display.png import GREY
from raytrain.runs.printable import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raytrain.diagnostics.look import LookResult

_COLUMNS = 8
_WIDTH, _HEADING, _ROW = 11.0, 0.5, 1.55  # inches
_MAX_LETTERS = 24  # of a label


def look_figure(result: LookResult) -> Figure:
    """A grid of images after augmentation, with the label of each above it."""
    from matplotlib.figure import Figure

    shown = result.first_images
    num_rows = max(1, -(-len(shown.labels) // _COLUMNS))
    figure = Figure(figsize=(_WIDTH, _HEADING + _ROW * num_rows), layout="constrained")
    cells = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    for cell, pixels, label in zip(cells, shown.pixels, shown.labels, strict=False):
        cell.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        cell.set_title(_shortened(one_line(label)), fontsize=8, color=GREY, pad=3, parse_math=False)
    title = f"{result.title}    the first images of epoch 1, as the network sees them"
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=10, parse_math=False)
    return figure


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 1]}…"
