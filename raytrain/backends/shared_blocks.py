"""Decoded images of a machine, once for all of its processes, in a file that they all map: in memory, if it can be.

Whoever needs a block first reads its images and writes them into the file, under a lock that the operating system
releases if the process dies. The others wait for the lock.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.data.block_order import CacheOrder
from raytrain.data.blocks import Block
from raytrain.data.decode import ImageShape
from raytrain.data.permutation import Int64s
from raytrain.storage.locks import file_lock

ReadBlock = Callable[[Int64s, int], Block]
"""Reads some samples and decodes them for an epoch."""


class SharedBlocks:
    """The blocks of ``order``, by number. All processes that name the same ``folder`` share them.

    Safe to call from several threads. Raises what ``read`` raises.
    """

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
        with file_lock(self._folder / f"{number}.lock", wait=wait):
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
    remaining = memoryview(values.tobytes())
    while remaining:
        written = os.pwrite(file, remaining, offset)
        remaining, offset = remaining[written:], offset + written
