"""Fetch and decode the images of a manifest. Never imports torch, because it runs in data tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from raytrain.data.decode import BadImage, ImageShape, Pixels, decode
from raytrain.data.decode_process import DecodeProcess
from raytrain.data.framing import STRETCHED, Frame, Framing
from raytrain.data.manifest import Manifest
from raytrain.data.shards import DamagedShard, read_packed
from raytrain.storage.base import ObjectChanged, Store


@dataclass(frozen=True)
class ImageReader:
    """Fetches and decodes the images of one store.

    ``isolated``: images are decoded in a process of their own, so that one that kills it is an unreadable image. That
    takes some 0.2 s to start, and 50 µs an image.
    """

    store: Store
    shape: ImageShape
    framing: Framing = STRETCHED
    isolated: bool = False

    def read(self, manifest: Manifest, frames: Sequence[Frame] | None = None) -> tuple[Pixels, dict[int, str]]:
        """The images of ``manifest``, uint8 (n, H, W, C), and index and reason of each one that could not be read.

        ``frames`` say what is seen of each image, in place of the reader's framing. The pixels of an unreadable image
        are 0. Raises StorageError if the store refuses or cannot be reached.
        """
        framed = list(zip(self._contents(manifest), frames or [self.framing.frame] * len(manifest), strict=True))
        if not self.isolated:
            return self._decode_all(framed, lambda data, frame: decode(data, self.shape, frame))
        with DecodeProcess(self.shape) as process:
            return self._decode_all(framed, process.decode)

    def _contents(self, manifest: Manifest) -> list[bytes | Exception]:
        if manifest.packing is not None:
            return read_packed(self.store, manifest.packing)
        return self.store.get_many(manifest.keys.to_pylist(), manifest.etags.to_pylist())

    def _decode_all(
        self, framed: Sequence[tuple[bytes | Exception, Frame]], decode_one: Callable[[bytes, Frame], Pixels]
    ) -> tuple[Pixels, dict[int, str]]:
        shape = self.shape
        images = np.zeros((len(framed), shape.height, shape.width, shape.channels), np.uint8)
        bad: dict[int, str] = {}
        for index, (data, frame) in enumerate(framed):
            try:
                images[index] = decode_one(_require_bytes(data), frame)
            except BadImage as error:
                bad[index] = str(error)
        return images, bad


def _require_bytes(data: bytes | Exception) -> bytes:
    """The content of a file; raises BadImage if the file itself is at fault, and any other exception as it is."""
    if isinstance(data, FileNotFoundError):
        raise BadImage("the object is gone")
    if isinstance(data, ObjectChanged):
        raise BadImage("the object was replaced after it was listed")
    if isinstance(data, DamagedShard):
        raise BadImage(str(data))
    if isinstance(data, Exception):
        raise data
    return data
