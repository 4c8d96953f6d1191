"""A random sample of image files: their formats and sizes, and which of them cannot be read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raytrain.data.dataset import Dataset, random_order
from raytrain.data.decode import BadImage
from raytrain.data.decode_process import DecodeProcess
from raytrain.data.image_header import ImageHeader, read_header
from raytrain.data.image_reader import read_contents, require_bytes

_MAX_IMAGES = 2048  # of the training images, and as many test images
_BLOCK = 64  # images that are read at once


class Range(NamedTuple):
    """The smallest, the middle and the largest of some whole numbers."""

    min: int
    median: int
    max: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Range | None:
        """None if there are no ``values``."""
        numbers = np.fromiter(values, np.int64)
        return cls(*(int(of(numbers)) for of in (np.min, np.median, np.max))) if len(numbers) else None


@dataclass(frozen=True)
class ImageSample:
    """What ``images`` random images are like. ``unreadable`` has key and reason of those that cannot be read."""

    images: int
    formats: dict[str, int]
    width: Range | None
    height: Range | None
    unreadable: tuple[tuple[str, str], ...]

    def summary(self) -> dict[str, Any]:
        """The sample as plain values."""
        sides = {name: each and each._asdict() for name, each in (("width", self.width), ("height", self.height))}
        unreadable = [{"key": key, "reason": reason} for key, reason in self.unreadable]
        return {"images": self.images, "formats": self.formats, **sides, "unreadable": unreadable}


def sample_images(data: Dataset, seed: int, deadline_s: float) -> ImageSample:
    """Decode up to 2,048 random training images, and as many test images, in a process of their own.

    Reading ends at ``deadline_s``, a time of ``time.monotonic``, but not before a few images were read. Raises
    StorageError if a store refuses or cannot be reached.
    """
    headers: list[ImageHeader] = []
    unreadable: list[tuple[str, str]] = []
    with DecodeProcess(data.test_format.shape) as process:
        for key, content in _contents(data, seed, deadline_s):
            try:
                file = require_bytes(content)
                process.decode(file)
                headers.append(read_header(file))
            except BadImage as error:
                unreadable.append((key, str(error)))
    return ImageSample(
        images=len(headers) + len(unreadable),
        formats=dict(Counter(header.format for header in headers).most_common()),
        width=Range.of(header.width for header in headers),
        height=Range.of(header.height for header in headers),
        unreadable=tuple(unreadable),
    )


def _contents(data: Dataset, seed: int, deadline_s: float) -> Iterator[tuple[str, bytes | Exception]]:
    """Keys and files, of training and test images in turn."""
    sets = [(data.train_store, data.train), (data.test_store, data.test)]
    orders = [random_order(manifest, seed) for _, manifest in sets]
    for start in range(0, _MAX_IMAGES, _BLOCK):
        if start and time.monotonic() >= deadline_s:
            return
        for (store, manifest), order in zip(sets, orders, strict=True):
            block = manifest.select(order[start : start + _BLOCK])
            yield from zip(block.keys.to_pylist(), read_contents(store, block), strict=True)
