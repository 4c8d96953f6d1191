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
from raytrain.data.plan.batch_plan import BatchPlan, samples_of
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.cache_choice import ImageCache
from raytrain.launch.decoders import Decoders, ImageReporter, num_decoders
from raytrain.runs.metric_row import SkippedImage
from raytrain.storage.locks import acquire
from raytrain.storage.retries_and_hedges import take_num_retries

_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # that are read ahead of a worker, besides those in its threads
ReadBlock = Callable[[Int64s, int], Block]
"""Reads some draws and decodes them for an epoch."""


class SharedBlocks:
    """The blocks of ``order``, by number, for all processes that name the same ``folder``, and for any thread.

    They are in one file, which each process maps into its memory: first the labels of all samples, int64, then their
    pixels, then a byte for each block, which is 1 once the block is there. A lock for each block decides which process
    reads it.
    """

    def __init__(self, folder: Path, order: CacheOrder, shape: ImageShape, read: ReadBlock) -> None:
        self._folder = folder
        self._order = order
        self._read = read

        # Every process lays out the same file, whoever creates it.
        num_samples, num_blocks = order.plan.num_samples, len(order)
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / "images", os.O_RDWR | os.O_CREAT, 0o600)
        self._images_at = num_samples * np.dtype(np.int64).itemsize  # after the labels
        self._written_at = self._images_at + num_samples * shape.num_bytes
        os.ftruncate(self._file, self._written_at + num_blocks)

        # Views of the mapping, whose memory all processes share.
        content = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._labels = np.frombuffer(content, np.int64, num_samples)  # (samples,)
        pixels = np.frombuffer(content, np.uint8, num_samples * shape.num_bytes, self._images_at)
        self._images = pixels.reshape(num_samples, shape.height, shape.width, shape.channels)  # (samples, H, W, C)
        self._written = np.frombuffer(content, np.bool_, num_blocks, self._written_at)  # (blocks,)

    def __call__(self, number: int) -> Block:
        """Return block ``number``. This process reads it, unless another one has read it or is reading it."""
        if not self._written[number]:
            self._write(number, wait=True)
        rows = self._rows(number)
        return Block(self._images[rows], self._labels[rows], self._order.draws(number))

    def read_ahead(self) -> None:
        """Read the blocks that nobody has read or reads, in order. Several threads and processes may do so at once."""
        for number in range(len(self._order)):
            # Another one reads this block; or it cannot be read, which whoever needs it will learn.
            with suppress(Exception):
                self._write(number, wait=False)

    def _write(self, number: int, wait: bool) -> None:
        """Read block ``number`` into the file unless it is there. If another one does: ``wait``, or BlockingIOError."""
        with acquire(self._folder / f"{number}.lock", wait=wait):
            if self._written[number]:
                return
            block = self._read(self._order.draws(number), self._order.epoch(number))
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


class MachineBatches(AbstractContextManager["MachineBatches"]):
    """A worker's :class:`raytrain.training.protocols.BatchSource`: its images are decoded by processes beside it.

    It forks the processes when it is made (see :class:`Decoders`), and ends them when it is closed. ``loads`` are the
    shares of all workers, and ``isolated`` says that an image that kills its decoder is to be skipped.
    """

    def __init__(
        self,
        data: Dataset,
        plan: BatchPlan,
        rank: int,
        loads: Sequence[float],
        cache: ImageCache,
        reporter: ImageReporter,
        *,
        isolated: bool,
    ) -> None:
        # One set of processes decodes training and test images, each into a part of memory that holds any block.
        data = data.kept_on(cache.disk)
        test_plan = data.test_plan(len(loads))
        sets = ((data.train_store, data.train_format, data.train), (data.test_store, data.test_format, data.test))
        block_bytes = [manifest.rows_per_block(format.shape) * format.shape.num_bytes for _, format, manifest in sets]
        self._decoders = Decoders(reporter, max(block_bytes))
        train, test = (
            _ImageSet(which, ImageReader(store, *format, isolated), manifest, self._decoders)
            for which, (store, format, manifest) in enumerate(sets)
        )

        # The processes fill the kept blocks ahead, while others wait for what the loop asks for.
        folder = Path(cache.folder)
        self._train = _Batches(train, Partition(plan, rank, loads), folder / "train", cache.train)
        self._test = _Batches(test, Partition(test_plan, rank, loads), folder / "test", cache.test)
        kept = [batches.kept for batches in (self._train, self._test) if batches.kept is not None]

        def read_ahead() -> None:
            for blocks in kept:
                blocks.read_ahead()

        self._decoders.start([train.read, test.read], read_ahead)

    def __exit__(self, *exception: object) -> None:
        self._decoders.__exit__(*exception)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return self._train.from_step(first_step)

    def test(self) -> Iterator[LocalBatch]:
        return self._test.from_step(0)


@dataclass(frozen=True)
class _ImageSet:
    """Images of one manifest, number ``which`` of the sets that ``decoders`` decode: 0 for training, 1 for test."""

    which: int
    reader: ImageReader
    manifest: Manifest
    decoders: Decoders

    def read(self, draws: Int64s, epoch: int, pixels: Pixels | None = None) -> Block:
        """Read the images of ``draws``, decoded for ``epoch``, in this process, into the bytes ``pixels`` if given.

        An image that cannot be read is black, and has the label -1.
        """
        images_read = self.manifest.select(samples_of(draws, len(self.manifest)))
        crops = self.reader.cropping.crops(draws, epoch)
        images, bad = self.reader.read(images_read, crops, pixels)
        labels = images_read.labels.astype(np.int64)
        labels[list(bad)] = -1
        skipped = [SkippedImage(images_read.keys[index].as_py(), reason) for index, reason in bad.items()]
        self.decoders.report(skipped, take_num_retries())
        return Block(images, labels, draws)

    def stream(self, order: WorkerOrder) -> Iterator[Block]:
        """Yield the blocks of ``order``, of which a few are decoded ahead."""
        block_bytes = order.rows_per_block * self.reader.shape.num_bytes
        num_ahead = num_decoders() + min(_AHEAD_BLOCKS, _AHEAD_BYTES // block_bytes)
        reading: deque[Future[Block]] = deque()
        for number in range(len(order)):
            reading.append(self.decoders.read(self.which, order.draws(number), order.epoch(number)))
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
            self.kept = self._cache = None
        else:
            self.kept = SharedBlocks(folder, order, images.reader.shape, images.read)
            self._cache = CachedBlocks(self.kept, order)

    def from_step(self, first_step: int) -> Iterator[LocalBatch]:
        if self._cache is not None:
            return batches_from_cache(self._partition, self._cache, first_step)
        rows = self._images.manifest.rows_per_block(self._images.reader.shape)
        blocks = self._images.stream(WorkerOrder(self._partition, first_step, rows))
        return batches_from_stream(self._partition, blocks, first_step)
