"""Names of training, validation and test images, as folders, files and values of a column have them.

A name is of a part if one of its words is, as in seg_train, Training Set or public-test. Validation images are tested
on, unless there are test images.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Part = Literal["train", "test"]

_OF_IMAGES = r"(set|data|images|imgs)?s?\d*[ab]?"  # trainA and trainB are of two kinds of images, as for CycleGAN
_TRAIN = re.compile(r"(train|training)" + _OF_IMAGES)
_TEST = re.compile(r"(public|private)?(test|testing)" + _OF_IMAGES)
_VALIDATION = re.compile(r"(val|valid|validation|validate|eval|evaluation|dev|holdout|heldout)" + _OF_IMAGES)
_WORDS = re.compile(r"[ _.-]+")


def is_training(name: str) -> bool:
    """Return whether a folder, a file or a value of this name is of training images: ``seg_train`` is."""
    return _has_word(_TRAIN, name)


def is_test(name: str) -> bool:
    """Return whether a folder, a file or a value of this name is of test or validation images: ``Val Set`` is."""
    return _has_word(_TEST, name) or _has_word(_VALIDATION, name)


def is_part(name: str) -> bool:
    """Return whether a folder, a file or a value of this name is of training, test or validation images."""
    return is_training(name) or is_test(name)


def test_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names to test on, sorted: those of test images, or else those of validation images.

    >>> test_names(["train", "val", "test"])
    ('test',)
    """
    ordered = sorted(set(names))
    by_kind = (tuple(name for name in ordered if _has_word(kind, name)) for kind in (_TEST, _VALIDATION))
    return next(filter(None, by_kind), ())


def parts_among(names: Iterable[str]) -> list[str]:
    """Return the names of training and test images, sorted; none unless there are some of each."""
    parts = sorted(filter(is_part, set(names)))
    return parts if {True, False} == set(map(is_training, parts)) else []


def _has_word(kind: re.Pattern[str], name: str) -> bool:
    return any(kind.fullmatch(word) for word in _WORDS.split(name.lower()))
