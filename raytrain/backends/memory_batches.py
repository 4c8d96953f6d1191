"""Batches from images that this process reads itself and keeps in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from raytrain.data.batch_plan import BatchPlan, Cursor
from raytrain.data.block_order import CacheOrder
from raytrain.data.blocks import Block, CachedBlocks
from raytrain.data.dataset import Dataset
from raytrain.data.image_reader import ImageReader
from raytrain.data.local_batch import LocalBatch, batches_as_read, batches_from_cache
from raytrain.data.manifest import Manifest
from raytrain.data.partition import Partition
from raytrain.data.permutation import Int64s
from raytrain.runs.skipped_images import SkippedImage

OnSkipped = Callable[[list[SkippedImage]], None]

_BLOCK_ROWS = 512


class MemoryBatches:
    """A :class:`raytrain.training.protocols.BatchSource` over images that are decoded once and stay in memory.

    Training images that are cropped at random from the originals are read again in each epoch.
    ``on_skipped`` is called with the images of a block that cannot be used. ``isolated``: see :class:`ImageReader`.
    """

    def __init__(
        self,
        data: Dataset,
        plan: BatchPlan,
        rank: int,
        loads: Sequence[float],
        on_skipped: OnSkipped,
        *,
        isolated: bool,
    ) -> None:
        test_plan = data.test_plan(len(loads))
        self._train = Partition(plan, rank, loads)
        self._test = Partition(test_plan, rank, loads)
        train_reader = ImageReader(data.train_store, *data.train_format, isolated)
        test_reader = ImageReader(data.test_store, *data.test_format, isolated)
        self._read_train = partial(_read, train_reader, data.train, on_skipped)
        self._crops_originals = data.train_format.framing.crop_seed is not None
        self._train_blocks = _blocks(self._read_train, plan)
        self._test_blocks = _blocks(partial(_read, test_reader, data.test, on_skipped), test_plan)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """This worker's part of each global batch from ``first_step`` on."""
        if self._crops_originals:
            return batches_as_read(self._train, self._read_train, first_step)
        return batches_from_cache(self._train, self._train_blocks, first_step)

    def test(self) -> Iterator[LocalBatch]:
        """This worker's part of the test images."""
        return batches_from_cache(self._test, self._test_blocks, 0)


def _blocks(read: Callable[[Int64s, int], Block], plan: BatchPlan) -> CachedBlocks:
    order = CacheOrder(plan, Cursor(), _BLOCK_ROWS)

    @cache
    def block(number: int) -> Block:
        return read(order.samples(number), order.epoch(number))

    return CachedBlocks(block, _BLOCK_ROWS, plan, Cursor())


def _read(reader: ImageReader, manifest: Manifest, on_skipped: OnSkipped, samples: Int64s, epoch: int) -> Block:
    """Fetch and decode ``samples`` of a manifest for ``epoch``."""
    wanted = manifest.select(samples)
    images, bad = reader.read(wanted, reader.framing.frames(samples, epoch))
    labels = wanted.labels.astype(np.int64)
    labels[list(bad)] = -1
    on_skipped([SkippedImage(wanted.keys[index].as_py(), reason) for index, reason in bad.items()])
    return Block(images, labels, samples)
