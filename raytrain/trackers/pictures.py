"""Images of the last evaluation with captions, and the confusion matrix, drawn for trackers."""

# matplotlib is typed in parts only.
# pyright: basic
from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from raytrain.runs.documents import EVALUATION, matches, read_json
from raytrain.runs.redact import one_line
from raytrain.storage.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pixels = NDArray[np.uint8]
_PNG = "data:image/png;base64,"
_MAX_IMAGES = 64  # of a group
_MAX_SIDE = 512  # pixels
_MAX_CLASSES = 1000
_MAX_NAME = 100  # characters of a class
_GROUPS = {"worst": "test/most_wrong", "batch": "train/last_batch"}
_CONFUSIONS = "test/confusion_matrix"
_NUM_COLUMNS = 4
_TILE, _GAP, _CAPTION = 152, 8, 30  # pixels
_BLACK, _WHITE = (30, 30, 30), (255, 255, 255)
_MAX_CLASSES_COUNTED = 30
_MAX_LABEL = 30  # characters of a class beside the matrix
_MIN_INCHES, _MAX_INCHES = 5.5, 16.0


def contact_sheet(images: Sequence[Pixels], captions: Sequence[str]) -> Pixels:
    """Join images, (H, W, 3) each, to one, with captions of up to two lines below them; a single one stays as it is."""
    if len(images) == 1:
        return images[0]
    columns = min(_NUM_COLUMNS, len(images))
    rows = -(-len(images) // columns)
    width, height = _TILE + _GAP, _TILE + _CAPTION + _GAP
    page = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _WHITE)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(12)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        left, top = _GAP + column * width, _GAP + row * height
        tile = ImageOps.pad(Image.fromarray(pixels), (_TILE, _TILE), Image.Resampling.NEAREST, _WHITE)
        page.paste(tile, (left, top))
        for line, text in enumerate(caption.split("\n")[:2]):
            draw.text((left, top + _TILE + 2 + 14 * line), _cut(text, _TILE, font), _BLACK, font)
    return np.asarray(page)


def confusion_matrix(counts: Mapping[tuple[int, int], int], classes: Sequence[str]) -> Pixels:
    """Draw counts by label and prediction as an image, (H, W, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    matrix = np.zeros((len(classes), len(classes)), np.int64)
    for (label, prediction), count in counts.items():
        matrix[label, prediction] = count
    canvas = FigureCanvasAgg(matrix_figure(matrix, classes))
    canvas.draw()
    return np.array(canvas.buffer_rgba())[:, :, :3]


def matrix_figure(matrix: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix, (C, C): true classes as rows, predicted ones as columns.

    Correct predictions are blue and wrong ones orange; the darker a cell, the larger its fraction of the true class. Up
    to 30 classes, the cells have counts.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    side = min(_MAX_INCHES, max(_MIN_INCHES, 3.0 + 0.45 * len(classes)))
    figure = Figure(figsize=(side + 0.5, side), layout="constrained")
    axes = figure.add_subplot()

    # Shades. They are not linear: rare confusions must be visible beside frequent ones.
    fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)  # of the true class, (C, C)
    diagonal = np.eye(len(fractions), dtype=bool)
    for colours, hidden in (("Blues", ~diagonal), ("Oranges", diagonal)):
        shown = np.ma.masked_array(fractions, hidden | (fractions == 0))
        axes.imshow(shown, cmap=colours, norm=PowerNorm(0.7, 0, 1), interpolation="nearest")

    # The classes along both sides, as many of them as can be read.
    cell_points = (side - 2) * 72 / len(classes)
    size = min(10.0, max(5.5, 0.7 * cell_points))
    ticks = range(0, len(classes), math.ceil(1.2 * size / cell_points))
    names = [one_line(classes[tick]) for tick in ticks]
    labels = [name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 1]}…" for name in names]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=size, parse_math=False)  # a $ is a $
    axes.set_yticks(ticks, labels, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#bbbbbb")
    axes.set_xlabel("predicted class", labelpad=10)
    axes.set_ylabel("true class", labelpad=10)

    # Counts, with lines between them, where there is room.
    if len(classes) <= _MAX_CLASSES_COUNTED:
        for row, column in np.argwhere(matrix):
            colour = "white" if fractions[row, column] > 0.4 else "#333333"
            axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", fontsize=8.5, color=colour)
        edges = np.arange(len(matrix) - 1) + 0.5
        axes.hlines(edges, -0.5, len(matrix) - 0.5, color="#e4e4e4", linewidth=0.5)
        axes.vlines(edges, -0.5, len(matrix) - 0.5, color="#e4e4e4", linewidth=0.5)
    return figure


def _cut(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Return as much of ``text`` as fits into ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


@dataclass(frozen=True)
class Pictures:
    """Images that belong together: their name, their pixels, (H, W, 3) each, and their captions."""

    key: str
    images: list[Pixels]
    captions: list[str]


def read_pictures(store: Store, after: int) -> tuple[int, list[Pictures]]:
    """Return the step of the last evaluation and its images; -1 and none unless that step is later than ``after``."""
    document = read_json(store, EVALUATION)
    step = document.get("step")
    if type(step) is not int or step <= after:
        return -1, []
    names = [one_line(str(name)[:_MAX_NAME]) for name in _list(document.get("classes"))[: _MAX_CLASSES + 1]]
    groups = [_examples(_list(document.get(part)), names, key) for part, key in _GROUPS.items()]
    confusions = Pictures(_CONFUSIONS, [], [])
    with suppress(IndexError, TypeError, ValueError, OverflowError):
        counts = {(label, prediction): int(count) for label, prediction, count in _list(document.get("confusion"))}
        if counts and len(names) <= _MAX_CLASSES:
            confusions.images.append(confusion_matrix(counts, names))
            confusions.captions.append("rows are the labels, columns the predictions")
    return step, [group for group in (*groups, confusions) if group.images]


def _examples(examples: list[Any], names: list[str], key: str) -> Pictures:
    """Decode the images of a part of the document, which anybody may have written: leave out what is no example."""
    pictures = Pictures(key, [], [])
    for example in examples[:_MAX_IMAGES]:
        with suppress(LookupError, AttributeError, TypeError, ValueError, OSError, Image.DecompressionBombError):
            png = base64.b64decode(example["image"].removeprefix(_PNG))
            image = Image.open(io.BytesIO(png), formats=["PNG"])
            if max(image.size) > _MAX_SIDE:
                continue
            probability = example.get("probability")
            percent = f" {probability:.0%}" if matches(probability, float) else ""
            caption = f"{names[example['label']]}\npredicted {names[example['prediction']]}{percent}"
            pictures.images.append(np.asarray(image.convert("RGB")))
            pictures.captions.append(caption)
    return pictures


def _list(value: object) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
