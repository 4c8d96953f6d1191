"""Batches from images that this process reads itself and keeps in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from raytrain.data.batch_plan import BatchPlan, Cursor
from raytrain.data.block_order import CacheOrder
from raytrain.data.blocks import Block, CachedBlocks
from raytrain.data.dataset import Dataset
from raytrain.data.decode import ImageReader
from raytrain.data.local_batch import LocalBatch, batches_from_cache
from raytrain.data.manifest import Manifest
from raytrain.data.partition import Partition
from raytrain.runs.skipped_images import SkippedImage
from raytrain.storage.base import Store

OnSkipped = Callable[[list[SkippedImage]], None]

_BLOCK_ROWS = 512


class MemoryBatches:
    """A :class:`raytrain.training.protocols.BatchSource` over images that are decoded once and stay in memory.

    ``on_skipped`` is called with the images of a block that cannot be used.
    """

    def __init__(
        self, data: Dataset, plan: BatchPlan, rank: int, loads: Sequence[float], on_skipped: OnSkipped
    ) -> None:
        test_plan = data.test_plan(len(loads))
        self._train = Partition(plan, rank, loads)
        self._test = Partition(test_plan, rank, loads)
        self._train_blocks = _blocks(data.train_store, data.train, data, plan, on_skipped)
        self._test_blocks = _blocks(data.test_store, data.test, data, test_plan, on_skipped)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """This worker's part of each global batch from ``first_step`` on."""
        return batches_from_cache(self._train, self._train_blocks, first_step)

    def test(self) -> Iterator[LocalBatch]:
        """This worker's part of the test images."""
        return batches_from_cache(self._test, self._test_blocks, 0)


def _blocks(store: Store, manifest: Manifest, data: Dataset, plan: BatchPlan, on_skipped: OnSkipped) -> CachedBlocks:
    order = CacheOrder(plan, Cursor(), _BLOCK_ROWS)
    reader = ImageReader(store, data.shape)

    @cache
    def block(number: int) -> Block:
        samples = order.samples(number)
        wanted = manifest.select(samples)
        images, bad = reader.read(wanted)
        labels = wanted.labels.astype(np.int64)
        labels[list(bad)] = -1
        on_skipped([SkippedImage(wanted.keys[index].as_py(), reason) for index, reason in bad.items()])
        return Block(images, labels, samples)

    return CachedBlocks(block, _BLOCK_ROWS, plan, Cursor())
