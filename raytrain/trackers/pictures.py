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

from raytrain.config.option_values import matches
from raytrain.runs.documents import EVALUATION, read_json
from raytrain.runs.redact import one_line
from raytrain.storage.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pixels = NDArray[np.uint8]
_PNG = "data:image/png;base64,"
_MAX_IMAGES = 64  # in a group
_MAX_SIDE = 512  # pixels
_MAX_CLASSES = 1000
_MAX_NAME = 100  # characters of a class
_DAMAGE = (LookupError, AttributeError, TypeError, ValueError, OSError, SyntaxError, Image.DecompressionBombError)
"""What a damaged image in a document raises; Pillow raises SyntaxError for a chunk of a PNG whose name is none."""
_GROUPS = {"worst": "validation/most_wrong", "batch": "train/last_batch"}
_CONFUSIONS = "validation/confusion_matrix"
_NUM_COLUMNS = 4
_TILE, _GAP, _CAPTION = 152, 8, 30  # pixels
_BLACK, _WHITE = (30, 30, 30), (255, 255, 255)
_MAX_CLASSES_COUNTED = 30
_MAX_LABEL = 30  # characters of a class beside the matrix
_MIN_INCHES, _MAX_INCHES = 5.5, 16.0


def contact_sheet(images: Sequence[Pixels], captions: Sequence[str]) -> Pixels:
    """Join images, (H, W, 3) each, with captions of up to two lines, to one image, (H, W, 3), of up to four columns.

    A single image is returned unchanged, without its caption.

    Example: ``contact_sheet([cat, dog], ["cat\\npredicted dog 80%", "dog\\npredicted dog 99%"])``
    """
    if len(images) == 1:
        return images[0]
    columns = min(_NUM_COLUMNS, len(images))
    rows = math.ceil(len(images) / columns)
    width, height = _TILE + _GAP, _TILE + _CAPTION + _GAP
    page = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _WHITE)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(12)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        left, top = _GAP + column * width, _GAP + row * height
        tile = ImageOps.pad(Image.fromarray(pixels), (_TILE, _TILE), Image.Resampling.NEAREST, _WHITE)
        page.paste(tile, (left, top))
        for line, text in enumerate(caption.split("\n")[:2]):
            draw.text((left, top + _TILE + 2 + 14 * line), _cut_to_width(text, _TILE, font), _BLACK, font)
    return np.asarray(page)


def confusion_matrix(counts: Mapping[tuple[int, int], int], classes: Sequence[str]) -> Pixels:
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

    # Draw the shades: for each square the darker of its two, and none where both are 0. They are not linear, so that
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
    axes.set_xticks(ticks, labels, rotation=90, fontsize=size, parse_math=False)  # a $ is a $
    axes.set_yticks(ticks, labels, fontsize=size, parse_math=False)
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


def _cut_to_width(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Return ``text``, or as much of its ends as fits into ``width`` pixels with an ellipsis between them."""
    lengths = range(len(text), 0, -1)
    return next((cut for cut in (cut_middle(text, length) for length in lengths) if font.getlength(cut) <= width), "…")


def cut_middle(name: str, length: int) -> str:
    """Return ``name`` with "…" in place of its middle if it is longer than ``length``.

    Names of classes often have a common start.

    Example:
        >>> cut_middle("species_of_bird_001", 9)
        'spec…_001'
    """
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}…{name[len(name) - end :]}"


@dataclass(frozen=True)
class Pictures:
    """Images that belong together: their name, their pixels, (H, W, 3) each, and their captions."""

    key: str
    images: list[Pixels]
    captions: list[str]


def read_pictures(store: Store, after: int) -> tuple[int, list[Pictures]]:
    """Return the step of the last evaluation of a run and its images, in groups; -1 and none if it is no news.

    It is news if its step is after ``after``. The groups are the images that are most wrong, those of the last batch,
    and the confusion matrix; a group without a readable image is left out.
    """
    document = read_json(store, EVALUATION)
    step = document.get("step")
    if type(step) is not int or step <= after:
        return -1, []
    # With one name more than the most classes, it is known below that there are too many for a confusion matrix.
    names = [one_line(str(name)[:_MAX_NAME]) for name in _list(document.get("classes"))[: _MAX_CLASSES + 1]]
    groups = [_decode_examples(_list(document.get(part)), names, key) for part, key in _GROUPS.items()]
    confusions = Pictures(_CONFUSIONS, [], [])
    with suppress(IndexError, TypeError, ValueError, OverflowError):
        counts = {(label, prediction): int(count) for label, prediction, count in _list(document.get("confusion"))}
        if counts and len(names) <= _MAX_CLASSES:
            confusions.images.append(confusion_matrix(counts, names))
            confusions.captions.append("rows are the labels, columns the predictions")
    return step, [group for group in (*groups, confusions) if group.images]


def _decode_examples(examples: list[Any], names: list[str], key: str) -> Pictures:
    """Return the images in a list of an evaluation's document, with captions, as the group ``key``.

    The document may be a stranger's, so damaged, very large and too many images are left out. ``names`` are those of
    the classes.
    """
    pictures = Pictures(key, [], [])
    for example in examples[:_MAX_IMAGES]:
        with suppress(*_DAMAGE):
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
    """Return a value of a document if it is a list, else an empty list."""
    return cast(list[Any], value) if isinstance(value, list) else []
