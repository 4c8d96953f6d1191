"""Weights of the classes in the loss, for classes of unequal size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import cast

from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.storage.open import read_input

BALANCED = "balanced"


def class_weights(option: str | None, train: Manifest) -> tuple[float, ...] | None:
    """The weight of each class that ``--class-weights`` asks for; None if it is not given.

    Balanced weights are N / (C · n_c), with n_c of the N images in class c of C: their mean over all images is 1. If an
    image may have several classes, a weight is that of the images that have the class: (N - n_c) / n_c.
    Raises UsageError if a file is not a JSON object with a number for each class.
    """
    if option is None:
        return None
    if option != BALANCED:
        return _read_weights(option, train.classes)
    sizes = train.class_counts().clip(min=1)
    if train.label_sets is not None:
        return tuple(((len(train) - sizes).clip(min=1) / sizes).tolist())
    return tuple((len(train) / (len(sizes) * sizes)).tolist())


def _read_weights(file: str, classes: tuple[str, ...]) -> tuple[float, ...]:
    try:
        content: object = json.loads(read_input(file))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UsageError(f"--class-weights is {file}, which must be balanced or a JSON file such as {{class: weight}}.")
    weights = cast("Mapping[str, object]", content)
    wrong = [name for name in sorted({*classes, *weights}) if name not in classes or not _is_weight(weights.get(name))]
    if wrong:
        raise UsageError(
            f"--class-weights: {file} must have a number of at least 0 for each of the {len(classes):,} classes and "
            f"nothing else; that is not so for {len(wrong):,}, such as {wrong[0]!r}."
        )
    return tuple(float(cast(float, weights[name])) for name in classes)


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
