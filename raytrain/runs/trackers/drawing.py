"""Draws what trackers without captions and tables show as an image: images with captions, and a confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
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
    """Counts by label and prediction as an image, (side, side, 3): a row for each label, right ones teal.

    Up to 32 classes, it has their names and the counts.
    """
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
