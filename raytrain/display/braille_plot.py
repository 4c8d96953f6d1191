"""A small plot of braille dots for rich, as wide as the space that it gets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.text import Text

from raytrain.display.console import UNKNOWN, format_optional

Floats = NDArray[np.float64]

_DOTS = np.array(  # the bit of the dot at (row, column) of a cell
    [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint16
)
_BLANK = 0x2800  # the character of a cell without dots; the bits of its dots are added to it
_LEGEND_INDENT = 2
_LARGEST = 1e300  # of the values that are drawn, whose differences are numbers, too
_AXIS_WIDTH = 7  # characters left of the axis, including a blank


@dataclass(frozen=True)
class Series:
    """Points in one ``style``: a line through them, or a ``mark`` on each. A y of None or NaN is left out."""

    label: str
    style: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    mark: str | None = None

    def points(self) -> tuple[Floats, Floats]:
        """Return x and y of the finite points, arrays of (num_points,)."""
        xs, ys = np.array(self.xs, dtype=np.float64), np.array(self.ys, dtype=np.float64)
        finite = np.isfinite(ys)
        return xs[finite], ys[finite].clip(-_LARGEST, _LARGEST)

    def last_value(self) -> str:
        """Return the last value for a legend: a dash without one, and if it is not finite, as after a divergence."""
        last = self.ys[-1] if len(self.ys) else None
        if last is None or not math.isfinite(last):
            return UNKNOWN
        return format_optional(float(last), _format(last, ".3f" if abs(last) < 10 else ".1f"))


@dataclass
class Plot:
    """Several ``series`` over one pair of axes, ``height`` lines high, below a ``title``.

    ``first_x`` and ``last_x`` are the formats of the labels at the ends of the x axis. Each series is named, in its
    style and with its last value, by the ``legend``: in the line of the title, or below the plot, in as many lines as
    it takes. If the line of the title is too narrow for it, it takes the last line of the plot.
    """

    title: str
    series: Sequence[Series]
    height: int = 8
    first_x: str = "{:,.0f}"
    last_x: str = "step {:,.0f}"
    legend: Literal["title", "below"] = "title"

    def __post_init__(self) -> None:
        self._points = [(series, *series.points()) for series in self.series]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = max(4, options.max_width - _AXIS_WIDTH - 1)

        # The title, and at its right or below the plot the name and last value of each series.
        names = [
            Text(
                f"{series.mark or '━'} {series.label} {series.last_value()}",
                style=f"not bold {series.style}",
                overflow="fold",
            )
            for series in self.series
        ]
        heading = Text(f"{self.title:>{_AXIS_WIDTH}}", style="bold", no_wrap=True, overflow="ellipsis")
        if self.legend == "below":
            yield heading
            yield from self._picture(width, self.height)
            yield Padding(Columns(names, padding=(0, 2)), (0, 0, 0, _LEGEND_INDENT))
            return

        # A value must not be cut: 0.2 of 0.25 looks like a value, too. The height stays the same, as a screen is full.
        separator = Text("  ")
        line = separator.join([heading, *names])
        if line.cell_len <= options.max_width:
            yield line
            yield from self._picture(width, self.height)
        else:
            yield heading
            yield from self._picture(width, self.height - 1)
            legend = separator.join(names)
            legend.no_wrap, legend.overflow = True, "ellipsis"
            yield Padding(legend, (0, 0, 0, _LEGEND_INDENT))

    def _picture(self, width: int, height: int) -> Iterator[Text]:
        """Yield the lines of the plot with its axes: ``height`` lines, and ``width`` characters right of the y axis."""
        # Without points, there are empty axes, as high as with points.
        drawn = [(xs, ys) for _, xs, ys in self._points if len(xs)]
        if not drawn:
            yield from [Text(_axis("", "│"), style="dim")] * height
            yield Text()
            return

        x_range = _range(np.concatenate([xs for xs, _ in drawn]), margin=1)
        all_ys = np.concatenate([ys for _, ys in drawn])
        low, high = _range_without_outliers(all_ys)

        # Labels of the y axis: at its ends and in its middle. Higher values are drawn at its upper end.
        labels = [""] * height
        labels[0], labels[height // 2], labels[-1] = _number(high), _number((low + high) / 2), _number(low)
        if high < all_ys.max():
            labels[0] = f"≥{labels[0]}"
        for label, line in zip(labels, self._lines(width, height, x_range, (low, high)), strict=True):
            yield Text.assemble((_axis(label, "┤" if label else "│"), "dim"), line)

        # Labels of the x axis: at both ends, or at the right end alone if there is no room for two.
        first, last = self.first_x.format(x_range[0]), self.last_x.format(x_range[1])
        has_room = len(first) + len(last) < width
        x_labels = first + last.rjust(width - len(first)) if has_room else last
        yield Text(" " * (_AXIS_WIDTH + 1) + x_labels, style="dim", no_wrap=True, overflow="crop")

    def _lines(
        self, width: int, height: int, x_range: tuple[float, float], y_range: tuple[float, float]
    ) -> Iterator[Text]:
        """Yield a text of ``width`` characters for each of the ``height`` rows of cells.

        Where several series are in a cell, the last one is drawn.
        """
        chars = np.full((height, width), " ", dtype="<U1")
        styles = np.full((height, width), "", dtype=object)
        for series, xs, ys in self._points:
            # A cell is 2 dots wide and 4 dots high; rows of dots are counted from the top.
            columns = _scaled(xs, x_range, 2 * width)
            rows = 4 * height - 1 - _scaled(ys.clip(*y_range), y_range, 4 * height)
            mark = "•" if len(xs) == 1 and series.mark is None else series.mark  # one point is no line
            if mark is None:
                cells = _line_cells(columns, rows, height, width)
                is_drawn = cells != _BLANK
                chars[is_drawn] = [chr(cell) for cell in cells[is_drawn]]
            else:
                is_drawn = np.zeros(chars.shape, dtype=bool)
                is_drawn[rows.astype(int) // 4, columns.astype(int) // 2] = True
                chars[is_drawn] = mark
            styles[is_drawn] = series.style

        # Neighbours of the same style become one span.
        for row, row_styles in zip(chars.tolist(), styles.tolist(), strict=True):
            text = Text()
            for style, cells in groupby(zip(row, row_styles, strict=True), key=itemgetter(1)):
                text.append("".join(char for char, _ in cells), style)
            yield text


def _range_without_outliers(values: Floats) -> tuple[float, float]:
    """Return the ends of an axis for ``values``; a few much higher ones, as in the first steps, do not stretch it.

    These are the highest 3 % of the values, if an axis for all values would be more than four times as long.
    """
    low, high = _range(values, margin=0.1)
    quantile = float(np.quantile(values, 0.97))
    if len(values) >= 20 and quantile > low and values.max() - low > 4 * (quantile - low):
        high = min(high, quantile + (quantile - low) / 4)
    return low, high


def _range(values: Floats, margin: float) -> tuple[float, float]:
    """Return the smallest and the largest value; if they are the same, that value minus and plus ``margin``.

    The margin of a large value is a part of it: 1e30 + 0.1 is 1e30.
    """
    low, high = float(values.min()), float(values.max())
    margin = max(margin, abs(low) * 1e-6)
    return (low, high) if high > low else (low - margin, high + margin)


def _scaled(values: Floats, limits: tuple[float, float], size: int) -> Floats:
    """Map ``values`` linearly so that ``limits`` become 0 and ``size`` - 1."""
    low, high = limits
    return (values - low) / (high - low) * (size - 1)


def _line_cells(columns: Floats, rows: Floats, height: int, width: int) -> NDArray[np.uint16]:
    """Return the braille cells (height, width) of a line through dots at ``columns`` and ``rows``, (num_points,) each.

    Points in the same column of dots are averaged.
    """
    cells = np.full((height, width), _BLANK, dtype=np.uint16)
    if not len(columns):
        return cells

    # The row of the line in each column of dots from the first point to the last, interpolated between points.
    point_columns = np.rint(columns).astype(np.intp)
    counts = np.bincount(point_columns)
    filled = np.flatnonzero(counts)
    means = np.bincount(point_columns, weights=rows)[filled] / counts[filled]
    xs = np.arange(int(filled[0]), int(filled[-1]) + 1)
    ys: list[int] = np.rint(np.interp(xs, filled, means)).astype(int).tolist()

    # A steep line fills the dots between its rows in neighbouring columns.
    for x, y, before in zip(xs.tolist(), ys, [ys[0], *ys[:-1]], strict=True):
        for dot in range(min(y, before), max(y, before) + 1):
            cells[dot // 4, x // 2] |= _DOTS[dot % 4, x % 2]
    return cells


def _number(value: float) -> str:
    """Return a label of the y axis, in scientific notation if it would not fit otherwise."""
    text = f"{value:{_format(value, '.3g')}}"
    return text if len(text) < _AXIS_WIDTH else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _format(value: float, small: str) -> str:
    """Return the format ``small``, or, for a ``value`` from 100 to 100,000, that of whole numbers, which is shorter."""
    return ",.0f" if 100 <= abs(value) < 100_000 else small


def _axis(label: str, rule: str) -> str:
    """Return the part of a line left of the plot: a label, and ``rule``, a character of the y axis."""
    return f"{label:>{_AXIS_WIDTH - 1}} {rule}"
