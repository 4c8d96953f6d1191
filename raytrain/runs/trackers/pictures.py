"""The images of a run's last evaluation as trackers get them: the worst ones, the last batch, and the confusion matrix.

They come from a document in storage, which anybody may have written: what is damaged is left out.
"""

from __future__ import annotations

import base64
import io
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from PIL import Image

from raytrain.runs.documents import read_json
from raytrain.runs.layout import EVALUATION
from raytrain.runs.printable import one_line
from raytrain.runs.stored_values import matches
from raytrain.runs.trackers.drawing import Pixels, confusion_matrix
from raytrain.storage.base import Store

_PNG = "data:image/png;base64,"
_MAX_IMAGES = 64  # of a group
_MAX_SIDE = 512  # pixels
_MAX_CLASSES = 1000
_MAX_NAME = 100  # characters of a class
_GROUPS = {"worst": "test/most_wrong", "batch": "train/last_batch"}
_CONFUSIONS = "test/confusion_matrix"


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
