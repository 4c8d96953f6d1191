"""A small plot of braille dots for rich, as wide as the space that it gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.text import Text

Floats = NDArray[np.float64]

_DOTS = np.array(  # the bit of the dot at (row, column) of a cell
    [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint16
)
_BLANK = 0x2800
_LEGEND_INDENT = 2
_AXIS_WIDTH = 7  # characters left of the axis, including a blank


@dataclass(frozen=True)
class Series:
    """Points in one ``style``: a line through them, or a ``mark`` on each. A y that is None or NaN is left out."""

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


@dataclass
class Plot:
    """Several ``series`` over one pair of axes, ``height`` lines high, below a ``title``.

    ``first_x`` and ``last_x`` are the formats of the labels at the ends of the x axis. Each series is named, in its
    style and with its last value, by the ``legend``: in the line of the title, which is cut at the plot's width, or
    below the plot, in as many lines as it takes.
    """

    title: str
    series: Sequence[Series]
    height: int = 8
    first_x: str = "{:,.0f}"
    last_x: str = "step {:,.0f}"
    legend: Literal["title", "below"] = "title"

    def __post_init__(self) -> None:
        self._points = [(one, *one.points()) for one in self.series]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = max(4, options.max_width - _AXIS_WIDTH - 1)
        yield self._heading()
        yield from self._picture(width)
        if self.legend == "below":
            yield Padding(Columns(self._names(), padding=(0, 2)), (0, 0, 0, _LEGEND_INDENT))

    def _picture(self, width: int) -> Iterator[Text]:
        drawn = [(xs, ys) for _, xs, ys in self._points if len(xs)]
        if not drawn:
            yield from [Text(_axis("", "│"), style="dim")] * self.height
            yield Text()
            return
        x_range = _range(np.concatenate([xs for xs, _ in drawn]), margin=1)
        low, high = _range(np.concatenate([ys for _, ys in drawn]), margin=0.1)
        y_range = low, min(high, _usual_high(np.concatenate([ys for _, ys in drawn]), low))
        for label, line in zip(
            self._labels(y_range, cut=y_range[1] < high), self._lines(width, x_range, y_range), strict=True
        ):
            yield Text.assemble((_axis(label, "┤" if label else "│"), "dim"), line)
        yield Text(self._bottom(width, *x_range), style="dim", no_wrap=True, overflow="crop")

    def _heading(self) -> Text:
        heading = Text(f"{self.title:>{_AXIS_WIDTH}}", style="bold", no_wrap=True, overflow="ellipsis")
        if self.legend == "title":
            for entry in self._names():
                heading.append("  ").append_text(entry)
        return heading

    def _names(self) -> list[Text]:
        """Name and last value of each series."""
        last = [f"{ys[-1]:{_format(ys[-1], '.3f')}}" if len(ys) else "–" for _, _, ys in self._points]
        return [
            Text(f"{one.mark or '━'} {one.label} {value}", style=f"not bold {one.style}", overflow="fold")
            for (one, _, _), value in zip(self._points, last, strict=True)
        ]

    def _labels(self, y_range: tuple[float, float], *, cut: bool) -> list[str]:
        low, high = y_range
        labels = [""] * self.height
        labels[0], labels[self.height // 2], labels[-1] = _number(high), _number((low + high) / 2), _number(low)
        labels[0] = "≥" * cut + labels[0]  # what is higher is drawn at the edge
        return labels

    def _bottom(self, width: int, low: float, high: float) -> str:
        first, last = self.first_x.format(low), self.last_x.format(high)
        return " " * (_AXIS_WIDTH + 1) + (
            first + last.rjust(width - len(first)) if len(first) + len(last) < width else last
        )

    def _lines(self, width: int, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[Text]:
        """One text of ``width`` characters for each of the ``height`` rows of cells."""
        chars = np.full((self.height, width), " ", dtype="<U1")
        styles = np.full((self.height, width), "", dtype=object)
        for one, xs, ys in self._points:
            columns = _scaled(xs, x_range, 2 * width)
            rows = 4 * self.height - 1 - _scaled(ys.clip(*y_range), y_range, 4 * self.height)
            mark = "•" if len(xs) == 1 and one.mark is None else one.mark
            if mark is None:
                cells = _braille(columns, rows, self.height, width)
                drawn = cells != _BLANK
                chars[drawn] = [chr(cell) for cell in cells[drawn]]
            else:
                drawn = np.zeros(chars.shape, dtype=bool)
                drawn[rows.astype(int) // 4, columns.astype(int) // 2] = True
                chars[drawn] = mark
            styles[drawn] = one.style
        return [_styled(row, style) for row, style in zip(chars.tolist(), styles.tolist(), strict=True)]


def _range(values: Floats, margin: float) -> tuple[float, float]:
    """The smallest and the largest value; if they are the same, ``margin`` below and above it."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - margin, high + margin)


def _usual_high(values: Floats, low: float) -> float:
    """The upper end of an axis that a few much higher values do not decide on."""
    most = float(np.quantile(values, 0.97))
    is_flattened = len(values) >= 20 and values.max() - low > 4 * (most - low) and most > low
    return most + (most - low) / 4 if is_flattened else float("inf")


def _scaled(values: Floats, limits: tuple[float, float], size: int) -> Floats:
    """Map ``values`` linearly so that ``limits`` become 0 and ``size`` - 1."""
    low, high = limits
    return (values - low) / (high - low) * (size - 1)


def _braille(columns: Floats, rows: Floats, height: int, width: int) -> NDArray[np.uint16]:
    """Cells (height, width) of a line through dots. Points in the same column of dots are averaged."""
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
    """The characters as one text; neighbours of the same style become one span."""
    text = Text()
    for style, piece in groupby(zip(chars, styles, strict=True), key=lambda pair: pair[1]):
        text.append("".join(char for char, _ in piece), style)
    return text


def _number(value: float) -> str:
    text = f"{value:{_format(value, '.3g')}}"
    return text if len(text) < _AXIS_WIDTH else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _format(value: float, small: str) -> str:
    """The format of ``value``: ``small``, or a whole number from 100 on: more digits would not fit beside the axis."""
    return ",.0f" if 100 <= abs(value) < 100_000 else small


def _axis(label: str, rule: str) -> str:
    return f"{label:>{_AXIS_WIDTH - 1}} {rule}"
