"""Batches from images that processes beside a machine's workers decode into shared memory."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.data.blocks import Block, CachedBlocks, Files, LocalBatch, batches_from_cache, batches_from_stream
from raytrain.data.dataset import Dataset, evaluation_plan
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import PARTS, Part
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.loader.choose_cache import MACHINE_BLOCK_BYTES, ImageCache
from raytrain.loader.decoder_processes import Decoders, ImageReporter, NewProcess, Report, num_decoders
from raytrain.storage.locks import acquire
from raytrain.storage.retries_and_hedges import take_num_retries

_AHEAD_BLOCKS, _AHEAD_BYTES = 4, 64 << 20  # limits on blocks read ahead, besides one for each thread
ReadBlock = Callable[[Int64s, int], Block]
"""Reads draws, and decodes them for an epoch."""


class SharedBlocks:
    """The kept blocks of ``order``, shared by all processes and threads that use the same ``folder``.

    They are in one file, which each process maps into its memory. The file has the labels of all samples, int64, the
    lengths of their files, int64, their pixels or files, and then a byte for each block, which is 1 once the block has
    been written. A lock for each block decides which process reads it. ``read`` reads a block. ``sizes_bytes`` is the
    room for each sample's file, int64 (samples,), in the order of the manifest; without it, pixels are kept, and the
    lengths are unused.
    """

    def __init__(
        self, folder: Path, order: CacheOrder, shape: ImageShape, read: ReadBlock, sizes_bytes: Int64s | None = None
    ) -> None:
        self._folder = folder
        self.order = order
        self._read = read

        # Every process computes the same layout, whoever creates the file. The rows of the file are in the order of the
        # blocks.
        num_samples, num_blocks = order.plan.num_samples, len(order)
        row_bytes = np.full(num_samples, shape.num_bytes, np.int64)
        if sizes_bytes is not None:
            row_bytes[order.row_of_sample()] = sizes_bytes
        ends = np.cumsum(row_bytes)
        self._starts = ends - row_bytes  # (samples,): bytes from the first image to that of each row
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / "images", os.O_RDWR | os.O_CREAT, 0o600)
        # The system frees the images once no process has their file open. Closing it any earlier than this object goes
        # could hit a thread that still writes.
        weakref.finalize(self, os.close, self._file)
        self._lengths_at = num_samples * np.dtype(np.int64).itemsize  # after the labels
        self._images_at = 2 * self._lengths_at
        self._written_at = self._images_at + int(ends[-1])
        os.ftruncate(self._file, self._written_at + num_blocks)

        # Make views of the mapped file, whose memory all processes share.
        content = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._labels = np.frombuffer(content, np.int64, num_samples)  # (samples,)
        self._lengths = np.frombuffer(content, np.int64, num_samples, self._lengths_at)  # (samples,)
        images: Any = np.frombuffer(content, np.uint8, int(ends[-1]), self._images_at)
        self._images: Any = (  # (samples, H, W, C)
            images.reshape(num_samples, *shape) if sizes_bytes is None else Files(images, self._starts, self._lengths)
        )

    def __call__(self, number: int) -> Block:
        """Return block ``number``. Read it, unless another process has; if another one is reading it, wait."""
        if not self._is_written(number):
            self._write(number, wait=True)
        rows = self._rows(number)
        return Block(self._images[rows], self._labels[rows], self.order.draws(number))

    def read_ahead(self) -> None:
        """Read, in order, the blocks that nobody has read or is reading; called by several threads and processes."""
        for number in range(len(self.order)):
            # An exception is no fault here: another thread is reading this block, or it cannot be read, which whoever
            # needs it will find out.
            with suppress(Exception):
                self._write(number, wait=False)

    def _write(self, number: int, wait: bool) -> None:
        """Read block ``number`` into the file, unless it is there.

        While another thread or process reads it, wait, or raise BlockingIOError if not ``wait``. Raises UsageError if
        it cannot be written, as when the disk or the shared memory of the file is full.
        """
        with acquire(self._folder / f"{number}.lock", wait=wait):
            if self._is_written(number):
                return
            block = self._read(self.order.draws(number), self.order.epoch(number))
            images, first = block.images, self._rows(number).start
            # Write to the file and not to its mapping, where a full disk would kill the process by a signal.
            try:
                if isinstance(images, Files):
                    _write_at(self._file, images.lengths, self._lengths_at + first * images.lengths.itemsize)
                    images = images.data
                _write_at(self._file, images, self._images_at + int(self._starts[first]))
                _write_at(self._file, block.labels, first * block.labels.itemsize)
                _write_at(self._file, np.ones(1, np.bool_), self._written_at + number)
            except OSError as error:
                place = os.path.dirname(os.path.realpath(self._folder / "images"))
                raise UsageError(
                    f"The images that --cache keeps take {self._written_at / 1e9:.2f} GB in {place}, and cannot be "
                    f"written there ({error.strerror}); make room there, or give --cache none."
                ) from error

    def _is_written(self, number: int) -> bool:
        """Return whether block ``number`` is in the file.

        Ask the file and not its mapping: where nothing has been written, that would need memory, too.
        """
        return os.pread(self._file, 1, self._written_at + number) == b"\1"

    def _rows(self, number: int) -> slice:
        """Return which rows of the file block ``number`` has."""
        start = number * self.order.rows_per_block
        return slice(start, start + self.order.rows_per_block)


def _write_at(file: int, values: npt.NDArray[Any], offset: int) -> None:
    """Write all of an array at a byte of a file; the system may take several calls for it."""
    remaining = np.ascontiguousarray(values).data.cast("B")
    while remaining:
        written = os.pwrite(file, remaining, offset)
        remaining, offset = remaining[written:], offset + written


@dataclass(frozen=True)
class PartImages:
    """The images of one part of a data set, and how a process reads them; it can be pickled for new processes.

    ``kept_in`` is the order in which the images are kept in a file of ``folder``; None if they are streamed.
    """

    reader: ImageReader
    manifest: Manifest
    kept_in: CacheOrder | None
    folder: Path

    @property
    def rows_per_block(self) -> int:
        """Images in one streamed block."""
        return self.manifest.rows_per_block(
            self.reader.shape, as_files=self.reader.as_files, most_bytes=MACHINE_BLOCK_BYTES
        )

    @property
    def room_bytes(self) -> int:
        """Bytes into which any streamed block fits: for files, as if each were as large as the largest."""
        if self.reader.as_files:
            return self.rows_per_block * int(self.manifest.sizes_bytes.max())
        return self.rows_per_block * self.reader.shape.num_bytes


class PartReader:
    """Reads :class:`PartImages` in a worker, or in a process beside it. ``kept`` are the kept blocks, if any."""

    def __init__(self, images: PartImages, report: Report) -> None:
        self._reader, self._manifest, self._report = images.reader, images.manifest, report
        self.kept: SharedBlocks | None = None
        if images.kept_in is not None:
            sizes_bytes = self._manifest.sizes_bytes if self._reader.as_files else None
            self.kept = SharedBlocks(images.folder, images.kept_in, self._reader.shape, self.read, sizes_bytes)

    def read(self, draws: Int64s, epoch: int, pixels: Pixels | None = None) -> Block:
        """Return the images of ``draws`` for ``epoch``, read in this process, and report those that could not be read.

        If ``pixels`` is given, the images are read into this memory.
        """
        block, skipped = self._reader.read_draws(self._manifest, draws, epoch, pixels)
        self._report(skipped, take_num_retries())
        return block

    def read_ahead(self) -> None:
        """Read the blocks that are to be kept."""
        if self.kept is not None:
            self.kept.read_ahead()


def open_readers(parts: Sequence[PartImages], report: Report) -> list[PartReader]:
    """Return a reader for each of the ``parts`` in this process.

    Example: ``decoders.start(partial(open_readers, parts))``
    """
    return [PartReader(images, report) for images in parts]


class MachineBatches(AbstractContextManager["MachineBatches"]):
    """A :class:`raytrain.training.protocols.BatchSource` whose images are decoded by processes beside the worker.

    It forks the processes when it is made, or takes the new ``processes`` (see :class:`Decoders`), and ends them when
    it is closed. ``loads`` are the shares of all workers. ``isolated``: an image that kills its decoder is skipped.

    Example::

        with MachineBatches(data, plan, 0, [1.0], ImageCache(), reporter, isolated=False) as batches:
            for local in batches.train(first_step=0):
                ...
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
        processes: Sequence[NewProcess] | None = None,
    ) -> None:
        data = data.kept_on(cache.disk)
        folder = Path(cache.folder)
        self._parts = [
            PartImages(ImageReader(store, *format, isolated), manifest, cache.order(part), folder / part)
            for part, (store, manifest, format) in data.parts.items()
        ]
        # The first part is that of the training images.
        evaluation_plans = (evaluation_plan(images.manifest, len(loads)) for images in self._parts[1:])
        self._partitions = [Partition(plan_of_part, rank, loads) for plan_of_part in (plan, *evaluation_plans)]

        # The same processes decode the images of all parts, so the parts of their memory have room for the largest
        # block. Some of their threads fill the kept blocks, while others wait for blocks that the loop needs.
        self._decoders = Decoders(reporter, max(images.room_bytes for images in self._parts), processes)

        # This process may have to read kept blocks itself. If somebody else has started it, decode these in isolation,
        # because an image may kill a decoder.
        parts_here = self._parts
        if processes is not None:
            parts_here = [replace(images, reader=replace(images.reader, isolated=True)) for images in parts_here]
        self._caches = [
            None if kept is None else CachedBlocks(partial(self._kept_block, kept), kept.order)
            for kept in (reader.kept for reader in open_readers(parts_here, self._decoders.report))
        ]
        self._decoders.start(partial(open_readers, self._parts))

    def __exit__(self, *exception: object) -> None:
        self._decoders.__exit__(*exception)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return self._batches(0, first_step)

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        return self._batches(PARTS.index(part), 0)

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        return self._parts[PARTS.index(part)].manifest.keys_of(samples)

    def _batches(self, part: int, first_step: int) -> Iterator[LocalBatch]:
        """Return the batches of part number ``part`` from ``first_step`` on: from the kept blocks, if there are any."""
        partition, cache = self._partitions[part], self._caches[part]
        if cache is not None:
            return batches_from_cache(partition, cache, first_step)
        images = self._parts[part]
        order = WorkerOrder(partition, first_step, images.rows_per_block)
        blocks = self._stream(part, order, images.room_bytes)
        return batches_from_stream(partition, blocks, first_step)

    def _kept_block(self, kept: SharedBlocks, number: int) -> Block:
        """Return kept block ``number``, unless the decoding has ended with an exception: see :meth:`Decoders.check`."""
        block = kept(number)
        self._decoders.check()
        return block

    def _stream(self, part: int, order: WorkerOrder, block_bytes: int) -> Iterator[Block]:
        """Yield the blocks of part number ``part`` in ``order``, and read some of them ahead."""
        num_ahead = num_decoders() + min(_AHEAD_BLOCKS, _AHEAD_BYTES // block_bytes)
        reading: deque[Future[Block]] = deque()
        for number in range(len(order)):
            reading.append(self._decoders.read(part, order.draws(number), order.epoch(number)))
            if len(reading) > num_ahead:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
