"""Fetch and decode the images of a manifest. Never imports torch, because it runs in data tasks.

An image takes these calls, in this order:

1. :meth:`ImageReader.read_draws` takes draws of the plan, and :meth:`ImageReader.read` rows of a manifest, and the
   crop of each. If workers decode the images themselves, it returns the files, and 2 is the last of these calls.
2. :func:`fetch_images` gives the bytes of their files as they arrive, from packed shards or one by one;
   :func:`require_bytes` says why a file is none.
3. :func:`raytrain.data.images.decode.decode` makes pixels of them: a JPEG by libjpeg-turbo, at the size that the
   crop needs, unless it is in CMYK; anything else by Pillow.
4. :class:`raytrain.data.images.crop_box.Crop` gives the crop box for the size in the file's header.
5. :func:`raytrain.data.images.crop_box.cut` cuts that out and resizes it.
6. The pixels go into one array, which a ``Block`` and :func:`raytrain.data.blocks.to_table` take without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from raytrain.data.blocks import Block, Files
from raytrain.data.images.crop_box import STRETCHED, Crop, Cropping, Pixels
from raytrain.data.images.decode import decode
from raytrain.data.images.decode_process import DecodeProcesses
from raytrain.data.images.image_format import BadImage, ImageShape
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.batch_plan import samples_of
from raytrain.data.plan.permutation import Int64s
from raytrain.data.shards import DamagedShard, each_packed
from raytrain.errors import ObjectArchived, UsageError, format_count
from raytrain.runs.metric_row import SkippedImage
from raytrain.storage.retries_and_hedges import fetch_each
from raytrain.storage.store import ObjectChanged, Store


@dataclass(frozen=True)
class ImageReader(AbstractContextManager["ImageReader"]):
    """Fetches and decodes the images of one store, in any number of threads.

    ``as_files``: draws are read as files, which are decoded elsewhere. ``isolated``: images are decoded in a process of
    their own, so that one that kills it is an unreadable image. That takes some 0.2 s to start, and 50 µs an image. It
    is kept for the next images until the reader is closed.
    """

    store: Store
    shape: ImageShape
    cropping: Cropping = STRETCHED
    as_files: bool = False
    isolated: bool = False
    _processes: DecodeProcesses = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_processes", DecodeProcesses(self.shape))

    def __exit__(self, *exception: object) -> None:
        self._processes.close()

    def read_draws(
        self, manifest: Manifest, draws: Int64s, epoch: int, pixels: Pixels | None = None
    ) -> tuple[Block, list[SkippedImage]]:
        """Return a block of the images of ``draws``, int64 (n,), decoded for ``epoch``, and the images that failed.

        An image that could not be read is black in the block, or an empty file, and has the label -1. ``pixels`` and
        the exceptions are those of :meth:`read`.
        """
        rows = manifest.select(samples_of(draws, len(manifest)))
        images: Pixels | Files
        if self.as_files:
            images, bad = self.read_files(rows, pixels)
        else:
            images, bad = self.read(rows, self.cropping.crops(draws, epoch), pixels)
        labels = rows.labels.astype(np.int64)
        labels[list(bad)] = -1
        skipped = [SkippedImage(rows.keys[index].as_py(), reason) for index, reason in bad.items()]
        return Block(images, labels, draws), skipped

    def read(
        self, manifest: Manifest, crops: Sequence[Crop] | None = None, pixels: Pixels | None = None
    ) -> tuple[Pixels, dict[int, str]]:
        """Return the images of ``manifest``, uint8 (n, H, W, C), and the reasons of those that failed, by index.

        ``crops`` say what is seen of each image, in place of the reader's cropping. The images are put into the bytes
        ``pixels``, uint8 (at least n·H·W·C,), if given. The pixels of an unreadable image are 0. Raises StorageError if
        the store refuses or cannot be reached.
        """
        shape = (len(manifest), *self.shape)
        images = np.empty(shape, np.uint8) if pixels is None else pixels[: math.prod(shape)].reshape(shape)
        crops = crops or [self.cropping.crop] * len(manifest)
        bad: dict[int, str] = {}

        # An image is decoded as it arrives, while others are on their way.
        with self._processes.one() if self.isolated else nullcontext() as process:
            for index, data in fetch_images(self.store, manifest):
                try:
                    content, crop = require_bytes(data), crops[index]
                    images[index] = process.decode(content, crop) if process else decode(content, self.shape, crop)
                except BadImage as error:
                    images[index], bad[index] = 0, str(error)
        return images, dict(sorted(bad.items()))

    def read_files(self, manifest: Manifest, room: Pixels | None = None) -> tuple[Files, dict[int, str]]:
        """Return the files of the images of ``manifest``, and the reasons of those that could not be read, by index.

        They are put into the bytes ``room``, if given, one after the other by their sizes in the manifest. A file that
        could not be read is empty. Raises StorageError if the store refuses or cannot be reached.
        """
        ends = np.cumsum(manifest.sizes_bytes)
        files = Files(
            np.empty(int(ends[-1]), np.uint8) if room is None else room,
            ends - manifest.sizes_bytes,
            np.zeros(len(manifest), np.int64),
        )
        bad: dict[int, str] = {}
        for index, data in fetch_images(self.store, manifest):
            try:
                content = np.frombuffer(require_bytes(data), np.uint8)
                if not len(content):
                    raise BadImage("the file is empty")
                if len(content) > manifest.sizes_bytes[index]:  # there is no room for it
                    raise BadImage("the object was replaced after it was listed")
                files.put(index, content)
            except BadImage as error:
                bad[index] = str(error)
        return files, dict(sorted(bad.items()))


def readable_images(store: Store, manifest: Manifest, shape: ImageShape, cropping: Cropping) -> list[Pixels]:
    """Return the readable images, each uint8 (H, W, C), without a copy; raise UsageError if there is none."""
    with ImageReader(store, shape, cropping, isolated=True) as reader:
        images, bad = reader.read(manifest)
    if len(bad) == len(images):
        reason = next(iter(bad.values()))
        raise UsageError(
            f"None of {format_count(len(bad), 'image')} of {store.url} can be decoded ({reason}); check the files."
        )
    return [image for index, image in enumerate(images) if index not in bad]


def read_contents(store: Store, manifest: Manifest) -> list[bytes | Exception]:
    """Return the content of each image's file in the order of ``manifest``, or the exception of fetching it."""
    contents: list[bytes | Exception] = [b""] * len(manifest)
    for index, content in fetch_images(store, manifest):
        contents[index] = content
    return contents


def fetch_images(store: Store, manifest: Manifest) -> Iterator[tuple[int, bytes | Exception]]:
    """Yield the index of each image with the content of its file, or the exception of fetching it, as they arrive."""
    if manifest.packing is not None:
        return each_packed(store, manifest.packing)
    return fetch_each(store.get, manifest.keys.to_pylist(), manifest.etags.to_pylist())


def require_bytes(data: bytes | Exception) -> bytes:
    """Return ``data``; if it is an exception, raise it, as a BadImage if it is about this one file."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, FileNotFoundError):
        raise BadImage("the object is gone")
    if isinstance(data, ObjectChanged):
        raise BadImage("the object was replaced after it was listed")
    if isinstance(data, DamagedShard):
        raise BadImage(str(data))
    if isinstance(data, ObjectArchived):
        raise BadImage("the object is archived; restore it first")
    raise data
