"""Blocks of decoded images, as Arrow tables too, and a whole data set of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.data.images.decode import ImageShape, Pixels
from raytrain.data.plan.partition import CacheOrder
from raytrain.data.plan.permutation import Int64s


@dataclass(frozen=True)
class Block:
    """Decoded images that are moved together. A label below 0 marks an image that could not be read."""

    images: npt.NDArray[np.uint8]  # (n, H, W, C)
    labels: Int64s  # (n,)
    samples: Int64s  # (n,), see BatchPlan.samples

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, count: int) -> tuple[Block, Block]:
        """The first ``count`` rows and the others, without a copy."""
        return (
            Block(self.images[:count], self.labels[:count], self.samples[:count]),
            Block(self.images[count:], self.labels[count:], self.samples[count:]),
        )


def to_block(table: pa.Table, shape: ImageShape) -> Block:
    """A block out of a table as :func:`to_table` makes it, without a copy."""
    column = table.column("image").combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    pixels = np.frombuffer(column.buffers()[1], np.uint8)
    start, stop = column.offset * shape.num_bytes, (column.offset + len(column)) * shape.num_bytes
    images = pixels[start:stop].reshape(-1, shape.height, shape.width, shape.channels)
    return Block(images, numbers(table.column("label")), numbers(table.column("sample")))


def to_table(pixels: Pixels, labels: Int64s, samples: Int64s) -> pa.Table:
    """Decoded images as a table, without a copy: the columns are image (H*W*C bytes), label and sample."""
    kind = pa.binary(pixels[0].size)
    column = pa.FixedSizeBinaryArray.from_buffers(kind, len(pixels), [None, pa.py_buffer(pixels)])
    return pa.table({"image": column, "label": number_array(labels), "sample": number_array(samples)})


class CachedBlocks:
    """A whole data set in the given order; ``block(i)`` waits until block ``i`` is there."""

    def __init__(self, block: Callable[[int], Block], order: CacheOrder) -> None:
        self._block = block
        self._rows_per_block = order.rows_per_block
        self._row_of_sample = order.row_of_sample()

    def gather(self, samples: Int64s) -> Block:
        """Copy the images of ``samples`` (see :meth:`BatchPlan.samples`) out of the blocks, in their order."""
        rows = self._row_of_sample[samples % len(self._row_of_sample)]
        order = np.argsort(rows, kind="stable")
        numbers, starts = np.unique(rows[order] // self._rows_per_block, return_index=True)
        images: npt.NDArray[np.uint8] | None = None
        labels = np.empty(len(samples), np.int64)
        for number, targets in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            block = self._block(number)
            sources = rows[targets] - number * self._rows_per_block
            if images is None:
                images = np.empty((len(samples), *block.images.shape[1:]), np.uint8)
            images[targets] = block.images[sources]
            labels[targets] = block.labels[sources]
        assert images is not None
        return Block(images, labels, samples)


# Arrow's own conversions import pandas, which takes a second or two.


def string_array(values: Sequence[str | None]) -> pa.LargeStringArray:
    """Text, None for null. Raises UnicodeEncodeError for text that is not valid Unicode."""
    encoded = [b"" if value is None else value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    valid = None
    if None in values:
        valid = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)), valid)


def number_array(values: npt.NDArray[Any]) -> pa.Array:
    """Numbers (n,), without a copy if they are contiguous."""
    contiguous = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """The numbers (n,) of a column without nulls."""
    return np.from_dlpack(column.combine_chunks())
