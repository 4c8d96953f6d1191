"""Names that say training, validation or test images, of folders, files and values in a column.

A name means a part if one of its words does, as in seg_train, Training Set or public-test. If several words do, it
means training images if one of these words does, as in train_val, and otherwise what the first one says, as in
test-dev.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Literal

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
HELD_OUT: tuple[Part, ...] = PARTS[1:]

_OF_IMAGES = r"(set|data|images|imgs)?s?\d*[ab]?"  # trainA and trainB are of two kinds of images, as for CycleGAN
_TRAIN = re.compile(r"(train|training|trainval)" + _OF_IMAGES)
_TEST = re.compile(r"(public|private)?(test|testing)" + _OF_IMAGES)
_VALIDATION = re.compile(r"(val|valid|validation|validate|eval|evaluation|dev|holdout|heldout)" + _OF_IMAGES)
_LAST = re.compile(r"(eval|evaluation|holdout|heldout|private|privatetest)" + _OF_IMAGES)
_KINDS: dict[Part, re.Pattern[str]] = {"train": _TRAIN, "validation": _VALIDATION, "test": _TEST}
_WORDS = re.compile(r"[ _.+-]+")
_NUMBER = re.compile(r"[ _.-]*\d+$")


def part_of(name: str) -> Part | None:
    """Return the part that a name means; None if it means none. No name means several, so no image is in two parts.

    >>> part_of("seg_train"), part_of("train_val2018"), part_of("Val Set"), part_of("extra")
    ('train', 'train', 'validation', None)
    """
    words = _WORDS.split(name.lower())
    parts: list[Part] = [part for word in words for part, kind in _KINDS.items() if kind.fullmatch(word)]
    return "train" if "train" in parts else next(iter(parts), None)


def is_training(name: str) -> bool:
    """Return True if a name means training images, as ``seg_train`` does."""
    return part_of(name) == "train"


def is_held_out(name: str) -> bool:
    """Return True if a name means validation or test images, as ``Val Set`` does."""
    return part_of(name) in HELD_OUT


def is_part(name: str) -> bool:
    """Return True if a name means training, validation or test images."""
    return part_of(name) is not None


def is_bare_part(name: str) -> bool:
    """Return True if a name says a part and nothing else but a number, as ``train`` and ``train_2`` do.

    Folders such as ``train_sim`` and ``train_real`` are two kinds of training images.
    """
    return any(kind.fullmatch(_NUMBER.sub("", name.lower())) for kind in _KINDS.values())


def names_of_parts(names: Iterable[str]) -> dict[Part, tuple[str, ...]]:
    """Return the sorted names that mean each part; a part without names is left out.

    >>> names_of_parts(["train", "val", "extra"])
    {'train': ('train',), 'validation': ('val',)}
    >>> names_of_parts(["training", "validation", "evaluation"])
    {'train': ('training',), 'validation': ('validation',), 'test': ('evaluation',)}
    """
    ordered = sorted(set(names))
    names_of: dict[Part, tuple[str, ...]] = {
        part: names for part in PARTS if (names := tuple(name for name in ordered if part_of(name) == part))
    }

    # Of validation and evaluation, as in Food-11, or PublicTest and PrivateTest, as in FER2013, the second is the test.
    if len(names_of.keys() & HELD_OUT) == 1:
        held_out = next(names for part, names in names_of.items() if part != "train")
        last = tuple(name for name in held_out if any(map(_LAST.fullmatch, _WORDS.split(name.lower()))))
        if 0 < len(last) < len(held_out):
            names_of.pop("test", None)
            names_of |= {"validation": tuple(name for name in held_out if name not in last), "test": last}
    return names_of


def numbered_names(names_of: Mapping[Part, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of one part that differ only in a number at their end, as train.X1 and train.X2; else none.

    If several parts have more than one name, as in train1, val1, train2 and val2, they may be folds of a
    cross-validation, in which an image is for training once and held out another time.
    """
    several = [names for names in names_of.values() if len(names) > 1]
    stems = {_NUMBER.sub("", name.lower()) for names in several for name in names}
    return several[0] if len(several) == 1 and len(stems) == 1 else ()


def parts_among(names: Iterable[str]) -> list[str]:
    """Return the sorted names that mean parts; empty unless some mean training and others held-out images.

    >>> parts_among(["train", "val", "extra"]), parts_among(["train", "extra"])
    (['train', 'val'], [])
    """
    parts = sorted(filter(is_part, set(names)))
    num_training = sum(map(is_training, parts))
    return parts if 0 < num_training < len(parts) else []


def part_like(part: Part, present: Container[Part]) -> Part | None:
    """Return ``part`` if it is present, or else the other held-out part that is; None for training images alone.

    Of two parts, the held-out one serves for validation as well as for a test, whatever it is called.

    >>> part_like("test", ("train", "validation")), part_like("train", ("test",))
    ('validation', None)
    """
    others = (part,) if part == "train" else (part, *HELD_OUT)
    return next((other for other in others if other in present), None)
