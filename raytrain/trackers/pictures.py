"""Images of the last evaluation with captions, and the confusion matrix, drawn for trackers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from raytrain.runs.documents import EVALUATION, matches, read_json
from raytrain.runs.redact import one_line
from raytrain.storage.store import Store

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
_CELL, _NAMES, _MARGIN = 34, 130, 6
_MAX_NAMED_CLASSES = 32
_MATRIX_SIDE = 512
_BLACK, _WHITE = (30, 30, 30), (255, 255, 255)
_RIGHT, _WRONG = np.array([14.0, 138, 138]), np.array([200.0, 80, 20])


def sheet(images: Sequence[Pixels], captions: Sequence[str]) -> Pixels:
    """Images, (H, W, 3), as one, with their captions of up to two lines below them; a single image as it is."""
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
        page.paste(_tile(pixels), (left, top))
        for line, text in enumerate(caption.split("\n")[:2]):
            draw.text((left, top + _TILE + 2 + 14 * line), _cut(text, _TILE, font), _BLACK, font)
    return np.asarray(page)


def confusion_matrix(counts: Mapping[tuple[int, int], int], classes: Sequence[str]) -> Pixels:
    """Counts by label and prediction as an image, (side, side, 3), with names and counts of up to 32 classes."""
    num_classes = len(classes)
    matrix = np.zeros((num_classes, num_classes))
    for (label, prediction), count in counts.items():
        matrix[label, prediction] = count
    named = num_classes <= _MAX_NAMED_CLASSES
    cell = _CELL if named else max(1, _MATRIX_SIDE // num_classes)
    heat = Image.fromarray(_shaded(matrix).repeat(cell, axis=0).repeat(cell, axis=1))
    return np.asarray(_with_names(heat, counts, classes) if named else heat)


def _shaded(matrix: NDArray[np.float64]) -> Pixels:
    """A pixel for each cell: the darker, the larger its fraction of the label. Not linear, so that rare ones show."""
    fractions = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))[:, :, None]
    colors = np.where(np.eye(len(matrix), dtype=bool)[:, :, None], _RIGHT, _WRONG)
    return (255 + fractions * (colors - 255)).round().astype(np.uint8)


def _with_names(heat: Image.Image, counts: Mapping[tuple[int, int], int], classes: Sequence[str]) -> Image.Image:
    page = Image.new("RGB", (heat.width + _NAMES, heat.height + _NAMES), _WHITE)
    page.paste(heat, (_NAMES, _NAMES))
    page.paste(_names(classes, _NAMES - _MARGIN, "rm"), (0, _NAMES))
    page.paste(_names(classes, _MARGIN, "lm").transpose(Image.Transpose.ROTATE_90), (_NAMES, 0))
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    draw.text((4, 4), "rows: labels\ncolumns: predictions", _BLACK, font)
    for (label, prediction), count in counts.items():
        center = (_NAMES + _CELL * (prediction + 0.5), _NAMES + _CELL * (label + 0.5))
        draw.text(center, f"{count:,}", _BLACK, font, anchor="mm")
    return page


def _names(classes: Sequence[str], x: int, anchor: str) -> Image.Image:
    """A column of names, a cell high each, of which ``anchor`` is at ``x``."""
    column = Image.new("RGB", (_NAMES, _CELL * len(classes)), _WHITE)
    draw, font = ImageDraw.Draw(column), ImageFont.load_default(12)
    for place, name in enumerate(classes):
        draw.text((x, _CELL * (place + 0.5)), _cut(name, _NAMES - 2 * _MARGIN, font), _BLACK, font, anchor=anchor)
    return column


def _tile(pixels: Pixels) -> Image.Image:
    """An image in a square, its pixels enlarged without blurring them."""
    image = Image.fromarray(pixels)
    scale = _TILE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    tile = Image.new("RGB", (_TILE, _TILE), _WHITE)
    tile.paste(image.resize(size, Image.Resampling.NEAREST), ((_TILE - size[0]) // 2, (_TILE - size[1]) // 2))
    return tile


def _cut(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """As much of ``text`` as fits into ``width`` pixels."""
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


@dataclass(frozen=True)
class EvaluationPictures:
    """All images of an evaluation after ``step`` completed steps; the step is -1 if there is none."""

    step: int
    groups: list[Pictures]


def read_pictures(store: Store, after: int) -> EvaluationPictures:
    """The images of the last evaluation; none if it was not after a later step than ``after``."""
    document = read_json(store, EVALUATION)
    step = document.get("step")
    if type(step) is not int or step <= after:
        return EvaluationPictures(-1, [])
    names = [one_line(str(name)[:_MAX_NAME]) for name in _list(document.get("classes"))[: _MAX_CLASSES + 1]]
    groups = [_examples(_list(document.get(part)), names, key) for part, key in _GROUPS.items()]
    groups.append(_confusions(_list(document.get("confusion")), names))
    return EvaluationPictures(step, [group for group in groups if group.images])


def _examples(examples: list[Any], names: list[str], key: str) -> Pictures:
    pictures = Pictures(key, [], [])
    for example in examples[:_MAX_IMAGES]:
        with suppress(KeyError, IndexError, TypeError, ValueError, OSError, Image.DecompressionBombError):
            pixels, caption = _pixels(example["image"]), _caption(example, names)
            pictures.images.append(pixels)
            pictures.captions.append(caption)
    return pictures


def _pixels(url: str) -> Pixels:
    image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix(_PNG))), formats=["PNG"])
    if max(image.size) > _MAX_SIDE:
        raise ValueError(f"an image of {image.width} × {image.height} pixels")
    return np.asarray(image.convert("RGB"))


def _caption(example: dict[str, Any], names: list[str]) -> str:
    probability = example.get("probability")
    sure = f" {probability:.0%}" if matches(probability, float) else ""
    return f"{names[example['label']]}\npredicted {names[example['prediction']]}{sure}"


def _confusions(cells: list[Any], names: list[str]) -> Pictures:
    pictures = Pictures(_CONFUSIONS, [], [])
    with suppress(IndexError, TypeError, ValueError, OverflowError):
        counts = {(label, prediction): int(count) for label, prediction, count in cells}
        if counts and len(names) <= _MAX_CLASSES:
            pictures.images.append(confusion_matrix(counts, names))
            pictures.captions.append("rows are the labels, columns the predictions")
    return pictures


def _list(value: object) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
