"""Batches from images that processes beside a machine's workers decode into shared memory."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.data.blocks import Block, CachedBlocks, LocalBatch, batches_from_cache, batches_from_stream
from raytrain.data.dataset import Dataset
from raytrain.data.images.decode import ImageShape, Pixels
from raytrain.data.images.image_reader import ImageReader
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.cache_choice import ImageCache
from raytrain.launch.decoders import Decoders, num_decoders
from raytrain.runs.metric_row import SkippedImage
from raytrain.storage.bucket_client import take_num_retries
from raytrain.storage.locks import acquire

ReadBlock = Callable[[Int64s, int], Block]  # reads some samples and decodes them for an epoch


class SharedBlocks:
    """The blocks of ``order``, by number, for all processes that name the same ``folder``, and for any thread."""

    def __init__(self, folder: Path, order: CacheOrder, shape: ImageShape, read: ReadBlock) -> None:
        self._folder = folder
        self._order = order
        self._read = read
        num_samples, num_blocks = order.plan.num_samples, len(order)
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / "images", os.O_RDWR | os.O_CREAT, 0o600)
        self._images_at = num_samples * np.dtype(np.int64).itemsize  # after the labels
        self._written_at = self._images_at + num_samples * shape.num_bytes
        os.ftruncate(self._file, self._written_at + num_blocks)
        content = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._labels = np.frombuffer(content, np.int64, num_samples)
        pixels = np.frombuffer(content, np.uint8, num_samples * shape.num_bytes, self._images_at)
        self._images = pixels.reshape(num_samples, shape.height, shape.width, shape.channels)
        self._written = np.frombuffer(content, np.bool_, num_blocks, self._written_at)  # (blocks,)

    def __call__(self, number: int) -> Block:
        """Block ``number``, which this process reads unless another one has, or does."""
        if not self._written[number]:
            self._write(number, wait=True)
        rows = self._rows(number)
        return Block(self._images[rows], self._labels[rows], self._order.samples(number))

    def read_ahead(self) -> None:
        """Read the blocks that nobody has read or reads, in order. Several threads and processes may do so at once."""
        for number in range(len(self._order)):
            # Another one reads this block; or it cannot be read, which whoever needs it will be told.
            with suppress(Exception):
                self._write(number, wait=False)

    def _write(self, number: int, wait: bool) -> None:
        with acquire(self._folder / f"{number}.lock", wait=wait):
            if self._written[number]:
                return
            block = self._read(self._order.samples(number), self._order.epoch(number))
            first = self._rows(number).start
            # Not through the mapping: a full disk would end the process without a word.
            _write_at(self._file, block.images, self._images_at + first * self._images[0].nbytes)
            _write_at(self._file, block.labels, first * block.labels.itemsize)
            _write_at(self._file, np.ones(1, np.bool_), self._written_at + number)

    def _rows(self, number: int) -> slice:
        start = number * self._order.rows_per_block
        return slice(start, start + self._order.rows_per_block)


def _write_at(file: int, values: npt.NDArray[Any], offset: int) -> None:
    remaining = np.ascontiguousarray(values).data.cast("B")
    while remaining:
        written = os.pwrite(file, remaining, offset)
        remaining, offset = remaining[written:], offset + written


_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # that are read ahead of a worker, besides those in its threads


class MachineBatches(AbstractContextManager["MachineBatches"]):
    """A :class:`BatchSource` over images that processes of this worker and its neighbours decode ahead.

    It forks them when it is made (see :class:`Decoders`), and ends them when it is closed.
    """

    def __init__(
        self,
        data: Dataset,
        plan: BatchPlan,
        rank: int,
        loads: Sequence[float],
        cache: ImageCache,
        reporter: Any,
        *,
        isolated: bool,
    ) -> None:
        data = data.kept_on(cache.disk)
        test_plan = data.test_plan(len(loads))
        sets = ((data.train_store, data.train_format, data.train), (data.test_store, data.test_format, data.test))
        block_bytes = [manifest.rows_per_block(format.shape) * format.shape.num_bytes for _, format, manifest in sets]
        self._decoders = Decoders(reporter, max(block_bytes))
        train, test = (
            _ImageSet(which, ImageReader(store, *format, isolated), manifest, self._decoders)
            for which, (store, format, manifest) in enumerate(sets)
        )
        folder = Path(cache.folder)
        self._train = _Batches(train, Partition(plan, rank, loads), folder / "train", cache.train)
        self._test = _Batches(test, Partition(test_plan, rank, loads), folder / "test", cache.test)
        self._decoders.start([train.read, test.read], self._read_ahead)

    def __exit__(self, *exception: object) -> None:
        self._decoders.__exit__(*exception)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return self._train.from_step(first_step)

    def test(self) -> Iterator[LocalBatch]:
        return self._test.from_step(0)

    def _read_ahead(self) -> None:
        self._train.read_ahead()
        self._test.read_ahead()


@dataclass(frozen=True)
class _ImageSet:
    """Images of one manifest, number ``which`` of the sets that ``decoders`` decode."""

    which: int
    reader: ImageReader
    manifest: Manifest
    decoders: Decoders

    def read(self, samples: Int64s, epoch: int, pixels: Pixels | None = None) -> Block:
        """The images of ``samples``, decoded for ``epoch``, in this process; into the bytes ``pixels`` if given."""
        wanted = self.manifest.select(samples % len(self.manifest))
        crops = self.reader.cropping.crops(samples, epoch)
        images, bad = self.reader.read(wanted, crops, pixels)
        labels = wanted.labels.astype(np.int64)
        labels[list(bad)] = -1
        skipped = [SkippedImage(wanted.keys[index].as_py(), reason) for index, reason in bad.items()]
        self.decoders.report(skipped, take_num_retries())
        return Block(images, labels, samples)

    def stream(self, order: WorkerOrder) -> Iterator[Block]:
        """The blocks of ``order``. A few of them are decoded ahead."""
        block_bytes = order.rows_per_block * self.reader.shape.num_bytes
        num_ahead = num_decoders() + min(_AHEAD_BLOCKS, _AHEAD_BYTES // block_bytes)
        reading: deque[Future[Block]] = deque()
        for number in range(len(order)):
            reading.append(self.decoders.read(self.which, order.samples(number), order.epoch(number)))
            if len(reading) > num_ahead:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


class _Batches:
    """A worker's batches of images, which are decoded once and kept in an ``order``, or whenever they are needed."""

    def __init__(self, images: _ImageSet, partition: Partition, folder: Path, order: CacheOrder | None) -> None:
        self._images = images
        self._partition = partition
        if order is None:
            self._kept = self._cache = None
        else:
            self._kept = SharedBlocks(folder, order, images.reader.shape, images.read)
            self._cache = CachedBlocks(self._kept, order)

    def from_step(self, first_step: int) -> Iterator[LocalBatch]:
        if self._cache is not None:
            return batches_from_cache(self._partition, self._cache, first_step)
        rows = self._images.manifest.rows_per_block(self._images.reader.shape)
        blocks = self._images.stream(WorkerOrder(self._partition, first_step, rows))
        return batches_from_stream(self._partition, blocks, first_step)

    def read_ahead(self) -> None:
        """Read what is kept."""
        if self._kept is not None:
            self._kept.read_ahead()
