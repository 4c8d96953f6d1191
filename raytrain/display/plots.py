"""A small plot of braille dots for rich, as wide as the place that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions
from rich.text import Text

Floats = NDArray[np.float64]

_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint16)  # bit of the dot at (row, column) of a cell
_BLANK = 0x2800
_AXIS_WIDTH = 7  # characters before the rule, a blank included


@dataclass(frozen=True)
class Series:
    """Points to draw in one ``style``: a line through them, or a ``mark`` on each. Points that are None or NaN are left out."""

    label: str
    style: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    mark: str | None = None

    def points(self) -> tuple[Floats, Floats]:
        """The finite points, each array (num_points,)."""
        xs, ys = np.array(self.xs, dtype=np.float64), np.array(self.ys, dtype=np.float64)
        finite = np.isfinite(ys)
        return xs[finite], ys[finite]


class Plot:
    """Series over one pair of axes; the heading names each series, in its style, with its last value.

    ``last_x`` is how the greatest x is written below the plot.
    """

    def __init__(self, title: str, series: Sequence[Series], height: int = 8, last_x: str = "step {:,.0f}") -> None:
        self._title = title
        self._series = [(one, *one.points()) for one in series]
        self._height = height
        self._last_x = last_x

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(4, options.max_width - _AXIS_WIDTH - 1)
        yield self._heading()
        drawn = [(xs, ys) for _, xs, ys in self._series if len(xs)]
        if not drawn:
            yield from [Text(_rule("", "│"), style="dim")] * self._height
            yield Text()
            return
        x_range = _range(np.concatenate([xs for xs, _ in drawn]), margin=1)
        y_range = _range(np.concatenate([ys for _, ys in drawn]), margin=0.1)
        for label, line in zip(self._labels(y_range), self._lines(width, x_range, y_range), strict=True):
            yield Text.assemble((_rule(label, "┤" if label else "│"), "dim"), line)
        yield Text(self._bottom(width, *x_range), style="dim", no_wrap=True, overflow="crop")

    def _heading(self) -> Text:
        heading = Text(f"{self._title:>{_AXIS_WIDTH}}", style="bold", no_wrap=True, overflow="ellipsis")
        for one, _, ys in self._series:
            value = f"{ys[-1]:{_form(ys[-1], '.3f')}}" if len(ys) else "–"
            heading.append(f"  {one.mark or '━'} {one.label} {value}", style=f"not bold {one.style}")
        return heading

    def _labels(self, y_range: tuple[float, float]) -> list[str]:
        low, high = y_range
        labels = [""] * self._height
        labels[0], labels[self._height // 2], labels[-1] = _number(high), _number((low + high) / 2), _number(low)
        return labels

    def _bottom(self, width: int, low: float, high: float) -> str:
        first, last = f"{low:,.0f}", self._last_x.format(high)
        return " " * (_AXIS_WIDTH + 1) + (first + last.rjust(width - len(first)) if len(first) + len(last) < width else last)

    def _lines(self, width: int, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[Text]:
        """One text for each row of cells, (height, width) characters."""
        chars = np.full((self._height, width), " ", dtype="<U1")
        styles = np.full((self._height, width), "", dtype=object)
        for one, xs, ys in self._series:
            columns = _scaled(xs, x_range, 2 * width)
            rows = 4 * self._height - 1 - _scaled(ys, y_range, 4 * self._height)
            if one.mark is None:
                cells = _braille(columns, rows, self._height, width)
                drawn = cells != _BLANK
                chars[drawn] = [chr(cell) for cell in cells[drawn]]
            else:
                drawn = np.zeros(chars.shape, dtype=bool)
                drawn[rows.astype(int) // 4, columns.astype(int) // 2] = True
                chars[drawn] = one.mark
            styles[drawn] = one.style
        return [_styled(row, style) for row, style in zip(chars.tolist(), styles.tolist(), strict=True)]


def _range(values: Floats, margin: float) -> tuple[float, float]:
    """The least and the greatest value, ``margin`` apart from the value where there is but one."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - margin, high + margin)


def _scaled(values: Floats, limits: tuple[float, float], size: int) -> Floats:
    """``values`` on 0 … ``size`` - 1, where ``limits`` come to lie on the ends."""
    low, high = limits
    return (values - low) / (high - low) * (size - 1)


def _braille(columns: Floats, rows: Floats, height: int, width: int) -> NDArray[np.uint16]:
    """Cells (height, width) of a line through dots; points that share a column of dots are averaged."""
    cells = np.full((height, width), _BLANK, dtype=np.uint16)
    if not len(columns):
        return cells
    at = np.rint(columns).astype(np.intp)
    counts = np.bincount(at)
    filled = np.flatnonzero(counts)
    means = np.bincount(at, weights=rows)[filled] / counts[filled]
    xs = np.arange(int(filled[0]), int(filled[-1]) + 1)
    ys: list[int] = np.rint(np.interp(xs, filled, means)).astype(int).tolist()
    for x, y, before in zip(xs.tolist(), ys, [ys[0], *ys[:-1]], strict=True):
        for dot in range(min(y, before), max(y, before) + 1):
            cells[dot // 4, x // 2] |= _DOTS[dot % 4, x % 2]
    return cells


def _styled(chars: Sequence[str], styles: Sequence[str]) -> Text:
    """The characters as one text, those of one style that stand together in one piece."""
    text = Text()
    for style, piece in groupby(zip(chars, styles, strict=True), key=lambda pair: pair[1]):
        text.append("".join(char for char, _ in piece), style)
    return text


def _number(value: float) -> str:
    return f"{value:{_form(value, '.3g')}}"


def _form(value: float, small: str) -> str:
    """How to write ``value``: as ``small`` says, or in whole numbers where those alone fill the axis."""
    return ",.0f" if 100 <= abs(value) < 100_000 else small


def _rule(label: str, rule: str) -> str:
    return f"{label:>{_AXIS_WIDTH - 1}} {rule}"
