"""Pictures of the last evaluation for trackers: images with captions, several on a sheet, and the confusion matrix."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from raytrain.config.option_values import matches
from raytrain.runs.documents import EVALUATION, read_json
from raytrain.runs.redact import one_line
from raytrain.storage.store import Store
from raytrain.trackers.confusion_matrix import confusion_matrix
from raytrain.trackers.lettering import cut_to_width, font_files

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
    draw = ImageDraw.Draw(page)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        left, top = _GAP + column * width, _GAP + row * height
        tile = ImageOps.pad(Image.fromarray(pixels), (_TILE, _TILE), Image.Resampling.NEAREST, _WHITE)
        page.paste(tile, (left, top))
        for line, text in enumerate(caption.split("\n")[:2]):
            font = ImageFont.truetype(font_files([text])[-1], 12)  # of its rarest letters, and Latin ones
            draw.text((left, top + _TILE + 2 + 14 * line), cut_to_width(text, _TILE, font), _BLACK, font)
    return np.asarray(page)


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
