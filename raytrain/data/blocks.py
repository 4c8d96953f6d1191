"""Blocks of images, as Arrow tables too; a data set of them; and local batches, assembled from them.

Images are read in blocks, because a task or a message for each would cost more than its decoding. They are decoded in
them, or remain files, which the worker decodes (:class:`Files`); both go the same way. A worker gets its blocks in one
of two ways. A stream brings the blocks of its own order: :func:`batches_from_stream` cuts them where a
local batch ends. A cache holds the blocks of the whole data set, in an order that no epoch shares:
:func:`batches_from_cache` picks the images of a local batch out of all of them. A
:class:`raytrain.data.prefetch.Prefetch` does either ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.image_format import ImageShape
from raytrain.data.plan.batch_plan import GlobalBatch, samples_of
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.data.plan.permutation import Int64s


@dataclass(frozen=True)
class Files:
    """Files of n images, each a part of one array, in place of an array of n decoded images.

    ``files[rows]`` selects some of them by a slice, indices or a mask, as in such an array, and copies no file.

    Example:
        >>> files = Files(np.frombuffer(b"abcde", np.uint8), np.array([0, 2]), np.array([2, 3]))
        >>> files[1:].contents()
        [b'cde']
    """

    data: Pixels  # (bytes,)
    starts: Int64s  # (n,)
    lengths: Int64s  # (n,)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: Any) -> Files:
        """Return some of the files, which share their array with these."""
        return Files(self.data, self.starts[rows], self.lengths[rows])

    def put(self, index: int, content: Pixels) -> None:
        """Write the content of file ``index`` at its start, and set its length; the array must have room for it."""
        start = self.starts[index]
        self.data[start : start + len(content)] = content
        self.lengths[index] = len(content)

    def contents(self) -> list[bytes]:
        """Return a copy of each file."""
        ranges = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [self.data[start : start + length].tobytes() for start, length in ranges]

    @classmethod
    def joined(cls, pieces: Sequence[Files]) -> Files:
        """Copy the files of all ``pieces`` into one array, one after the other."""
        lengths = np.concatenate([piece.lengths for piece in pieces])
        ends = np.cumsum(lengths)
        files = cls(np.empty(ends[-1] if len(ends) else 0, np.uint8), ends - lengths, lengths)
        contents = [
            piece.data[start : start + length]
            for piece in pieces
            for start, length in zip(piece.starts.tolist(), piece.lengths.tolist(), strict=True)
        ]
        if contents:
            np.concatenate(contents, out=files.data)
        return files


@dataclass(frozen=True)
class Block:
    """Images that travel together. A label below 0 marks an image that could not be read."""

    images: Any  # decoded ones, uint8 (n, H, W, C), or Files
    labels: Int64s  # (n,)
    draws: Int64s  # (n,), see BatchPlan.draws

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, count: int) -> tuple[Block, Block]:
        """Return the first ``count`` rows and the others, without a copy."""
        return (
            Block(self.images[:count], self.labels[:count], self.draws[:count]),
            Block(self.images[count:], self.labels[count:], self.draws[count:]),
        )


_NO_ROWS = Block(np.empty((0, 0, 0, 0), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))


def to_block(table: pa.Table, shape: ImageShape) -> Block:
    """Return the block in a table of :func:`to_table`, without a copy if the table is one chunk.

    ``shape`` is that of the decoded images; files have none.
    """
    table = table.combine_chunks()  # of a table, for that of a column copies even a single chunk
    column = table.column("image").chunk(0)
    labels, draws = numbers(table.column("label")), numbers(table.column("draw"))

    # A slice of a table has the buffers of the whole one, so begin at its offset.
    if "length" in table.column_names:
        _, starts, data = column.buffers()
        starts = np.frombuffer(starts, np.int64)[column.offset : column.offset + len(column)]
        return Block(Files(np.frombuffer(data, np.uint8), starts, numbers(table.column("length"))), labels, draws)
    pixels = np.frombuffer(column.buffers()[1], np.uint8)
    start, stop = column.offset * shape.num_bytes, (column.offset + len(column)) * shape.num_bytes
    return Block(pixels[start:stop].reshape(-1, *shape), labels, draws)


def to_table(block: Block) -> pa.Table:
    """Return a block as a table, without a copy: the columns are image (H*W*C bytes), label and draw.

    A file is in the column image, too, which may end with undefined bytes after the ``length`` that another column has.
    """
    images = block.images
    numbers_of = {"label": number_array(block.labels), "draw": number_array(block.draws)}
    if isinstance(images, Files):
        # In Arrow, a value goes up to the start of the next one. Files lie in their order in the array, perhaps with
        # room that is left between them.
        starts = np.append(images.starts, len(images.data))
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(images.data)]
        column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(images), buffers)
        return pa.table({"image": column, "length": number_array(images.lengths), **numbers_of})
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(images[0].size), len(images), [None, pa.py_buffer(images)])
    return pa.table({"image": column, **numbers_of})


class Buffers:
    """Arrays for images, each used again once nobody has a reference to it or to a part of it.

    The system clears memory before a process gets it. For a large batch that takes longer than copying the images.
    """

    def __init__(self) -> None:
        self._free: list[Pixels] = []

    def take(self, shape: tuple[int, ...]) -> Pixels:
        """Return an array of this shape, uint8, whose content is undefined: ``buffers.take((8, 32, 32, 3))``."""
        size = math.prod(shape)
        try:
            array = self._free.pop()
        except IndexError:  # none is free; asking first would race with other threads
            array = np.empty(size, np.uint8)
        if len(array) < size:
            array = np.empty(size, np.uint8)
        return lend(array, partial(self._keep, array))[:size].reshape(shape)

    def _keep(self, array: Pixels) -> None:
        """Take back an array that nobody has any more."""
        if len(self._free) < _MAX_FREE:
            self._free.append(array)


def lend(array: Pixels, give_back: Callable[[], None]) -> Pixels:
    """Return the same array, uint8 (n,); call ``give_back`` once nobody refers to it or to a part of it any more."""
    return np.asarray(_Lent(array, give_back))


class _Lent:
    """The owner of ``array``: each array that is made of it refers to this."""

    def __init__(self, array: Pixels, give_back: Callable[[], None]) -> None:
        self._array, self._give_back = array, give_back
        self.__array_interface__ = array.__array_interface__

    def __del__(self) -> None:
        self._give_back()


_MAX_FREE = 2  # arrays that wait for the next use: more would only keep memory from others


class CachedBlocks:
    """The blocks of a whole data set in the given order; ``block(number)`` waits until that block has been read."""

    def __init__(self, block: Callable[[int], Block], order: CacheOrder) -> None:
        self._block = block
        self._rows_per_block = order.rows_per_block
        self._row_of_sample = order.row_of_sample()
        self._buffers = Buffers()

    def gather(self, draws: Int64s) -> Block:
        """Copy the images of ``draws`` out of the blocks, in their order."""
        # Ask for each block once: the positions in the batch, sorted by row of the data set, fall into runs of one
        # block.
        rows = self._row_of_sample[samples_of(draws, len(self._row_of_sample))]
        order = np.argsort(rows, kind="stable")
        block_numbers, starts = np.unique(rows[order] // self._rows_per_block, return_index=True)

        # Pixels go straight to their positions in the batch. Files are collected block by block, and put in order at
        # last.
        images: Pixels | None = None
        files: list[Files] = []
        labels = np.empty(len(draws), np.int64)
        for number, targets in zip(block_numbers.tolist(), np.split(order, starts[1:]), strict=True):
            block = self._block(number)
            sources = rows[targets] - number * self._rows_per_block
            labels[targets] = block.labels[sources]
            if isinstance(block.images, Files):
                files.append(block.images[sources])
                continue
            if images is None:
                images = self._buffers.take((len(draws), *block.images.shape[1:]))
            images[targets] = block.images[sources]
        if images is None:  # the argsort of a permutation is its inverse: it puts files from ``order`` into the batch's
            return Block(Files.joined(files)[np.argsort(order)], labels, draws)
        return Block(images, labels, draws)


# Arrow arrays are made of buffers here, because Arrow's own conversions import pandas, which takes a second or two.


def string_array(values: Sequence[str | None]) -> pa.LargeStringArray:
    """Return an Arrow array of texts; None becomes null. Raise UnicodeEncodeError for text that is no valid Unicode."""
    # Arrow's layout of such an array: one bit per text, 0 for null; where each text begins and ends; all texts joined.
    encoded = [b"" if value is None else value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    valid = None  # if no text is null, the bits are left out
    if None in values:
        valid = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)), valid)


def number_array(values: npt.NDArray[Any]) -> pa.Array:
    """Return numbers (n,) as an Arrow array, without a copy if they are contiguous."""
    contiguous = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return the numbers (n,) of a column without nulls."""
    return np.from_dlpack(column.combine_chunks())


@dataclass(frozen=True)
class LocalBatch:
    """One worker's slice of a global batch, without the images that could not be read."""

    batch: GlobalBatch
    images: Any  # uint8 (m, H, W, C), an array, or a tensor if a device has decoded them; or Files
    labels: Int64s  # (m,)
    samples: Int64s  # (m,), indices into the manifest
    draws: Int64s  # (m,), what random numbers depend on: see BatchPlan.draws
    microbatch_sizes: tuple[int, ...]  # how many of the m are in each microbatch

    def without(self, unreadable: npt.NDArray[np.bool_]) -> LocalBatch:
        """Return the batch without the images, (m,), that are ``unreadable``."""
        if not unreadable.any():
            return self
        kept = ~unreadable
        microbatches = np.split(kept, np.cumsum(self.microbatch_sizes)[:-1])
        return replace(
            self,
            images=self.images[kept],
            labels=self.labels[kept],
            samples=self.samples[kept],
            draws=self.draws[kept],
            microbatch_sizes=tuple(int(rows.sum()) for rows in microbatches),
        )


def batches_from_stream(partition: Partition, blocks: Iterable[Block], first_step: int) -> Iterator[LocalBatch]:
    """Cut the worker's blocks, which arrive in its order, into local batches from ``first_step`` to the plan's end.

    Images that could not be read are left out of the batches.
    """
    source = iter(blocks)
    remaining: Block | None = None  # of the block that the last batch ended in
    buffers = Buffers()
    for step in range(first_step, partition.plan.num_steps):
        # Take as many rows as the batch has, from the block that the last batch ended in and from the next ones.
        batch = partition.plan.batch(step)
        pieces: list[Block] = []
        num_missing = sum(partition.microbatch_sizes(batch))
        while num_missing > 0:
            block = next(source) if remaining is None else remaining
            head, tail = block.split(min(num_missing, len(block)))
            pieces.append(head)
            num_missing -= len(head)
            remaining = tail if len(tail) else None

        # Rows of one block are used where they are; those of several are copied into one array.
        rows = pieces[0] if pieces else _NO_ROWS
        if len(pieces) > 1:
            images_of_pieces: list[Any] = [piece.images for piece in pieces]
            if isinstance(images_of_pieces[0], Files):
                images = Files.joined(images_of_pieces)
            else:
                images = buffers.take((sum(map(len, pieces)), *images_of_pieces[0].shape[1:]))
                np.concatenate(images_of_pieces, out=images)
            labels = np.concatenate([piece.labels for piece in pieces])
            rows = Block(images, labels, np.concatenate([piece.draws for piece in pieces]))
        yield _local_batch(partition, batch, rows)


def batches_from_cache(partition: Partition, blocks: CachedBlocks, first_step: int) -> Iterator[LocalBatch]:
    """Gather the worker's local batches from a data set in memory, from ``first_step`` to the plan's end.

    Images that could not be read are left out of the batches.
    """
    for step in range(first_step, partition.plan.num_steps):
        batch = partition.plan.batch(step)
        draws = partition.local_draws(batch)
        yield _local_batch(partition, batch, blocks.gather(draws) if len(draws) else _NO_ROWS)


def _local_batch(partition: Partition, batch: GlobalBatch, rows: Block) -> LocalBatch:
    """Return the local batch of these rows, without the images that could not be read."""
    samples, sizes = samples_of(rows.draws, partition.plan.num_samples), partition.microbatch_sizes(batch)
    return LocalBatch(batch, rows.images, rows.labels, samples, rows.draws, sizes).without(rows.labels < 0)
