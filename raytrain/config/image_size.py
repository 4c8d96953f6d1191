"""The size of images: the same in all epochs, or one that grows, as ``--image-size 128..224`` says."""

from __future__ import annotations

import re

from raytrain.errors import UsageError

Size = tuple[int, int]
"""Height and width in pixels."""

DEFAULT: Size = (224, 224)

_FULL_AFTER = 0.8  # of the epochs; the others fit the network to the size that it is used with
_MULTIPLE = 4  # of so many pixels, which networks halve without a remainder


def first_and_full_size(image_size: Size | str) -> tuple[Size, Size]:
    """The size of training images in the first epoch, and in the last ones and for all other images."""
    if not isinstance(image_size, str):
        return image_size, image_size
    first, _, full = image_size.partition("..")
    return (int(first), int(first)), (int(full), int(full))


def training_size(image_size: Size | str, epoch: int, epochs: int) -> Size:
    """The size of training images in ``epoch``, counted from 0, of so many ``epochs``.

    It grows linearly, in multiples of four pixels, and is the full one in the last fifth of the epochs, at least in the
    last one.
    """
    first, full = first_and_full_size(image_size)
    fraction = epoch / max(1, int(_FULL_AFTER * epochs))
    if first == full or fraction >= 1:
        return full
    height, width = (
        side + int(fraction * (end - side)) // _MULTIPLE * _MULTIPLE for side, end in zip(first, full, strict=True)
    )
    return height, width


def check_image_size(image_size: Size | str | None, epochs: int) -> None:
    """Raise UsageError for a range that is none, or that there are too few epochs for."""
    if not isinstance(image_size, str):
        return
    if not re.fullmatch(r"[1-9]\d*\.\.[1-9]\d*", image_size):
        raise UsageError(
            f"--image-size is {image_size!r}; give height and width, such as 224 224, or a range for images that grow "
            "from epoch to epoch, such as 128..224."
        )
    (first, _), (full, _) = first_and_full_size(image_size)
    if first >= full or epochs == 1:
        raise UsageError(
            f"--image-size is {image_size} and --epochs {epochs}; a range starts with the smaller size, and needs at "
            "least two epochs to grow in."
        )
