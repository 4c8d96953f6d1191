"""Predicting images: the request, and threads that read blocks of images ahead of a network.

A single process predicts all blocks of images, or each actor of a cluster a share of them. Imports neither Ray nor
torch.

Blocks are divided over networks, and those of a network over its readers, by the same rule, which keeps the order of
the manifest: number i of n gets the blocks i, i + n, i + 2n, …, and :func:`in_turn` takes one result of each in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import numpy as np
import pyarrow as pa

from raytrain.data.blocks import string_array
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.permutation import Int64s
from raytrain.data.prefetch import Prefetch
from raytrain.launch.placement import Placement
from raytrain.loader.machine import cores
from raytrain.storage.store import Store

T = TypeVar("T")

_AHEAD = 1  # finished blocks that wait for the network, for each thread
_CLOSE_S = 10.0  # seconds that a thread has to end
_MAX_READERS = 8  # threads; more of them would leave too little of the interpreter's time to the network

BlockPredictor = Callable[[Pixels, Int64s], pa.Table]
"""Returns a table of n rows, the predictions, for images, uint8 (n, H, W, C), and labels, int64 (n,).

A label that is not known is negative.
"""
LoadPredictor = Callable[[Store, int, int], BlockPredictor]
"""Loads a predictor, given the store of the run, how many threads it may use, and the number of its GPU, if any.

Can be pickled, so that it can be sent to another process.
"""


@dataclass(frozen=True)
class PredictRequest:
    """The images to predict (``manifest`` in the store ``images``), and the network of the run in ``run_store``."""

    images: Store
    manifest: Manifest
    format: ImageFormat
    run_store: Store
    load_predictor: LoadPredictor

    def blocks(self, first: int, stride: int) -> list[Manifest]:
        """Return every ``stride``-th block of images, from block ``first`` on."""
        rows, count = self.manifest.rows_per_block(self.format.shape), len(self.manifest)
        starts = range(first * rows, count, stride * rows)
        return [self.manifest.select(np.arange(start, min(start + rows, count))) for start in starts]


def predict_here(request: PredictRequest, placement: Placement) -> Iterator[pa.Table]:
    """Predict with ``placement.num_workers`` networks in this process, each on a GPU or on its share of the cores.

    Yields a table for each block of images, in the manifest's order, with the columns key, error (why the image could
    not be read, else null) and those of the predictor, which have no meaning if there is an error.
    """
    # The networks share up to 8 readers; each has at least one.
    num_networks = placement.num_workers
    num_readers = max(1, min(_MAX_READERS, cores()) // num_networks)
    with ExitStack() as opened:
        yield from in_turn(
            [
                _ahead(
                    predict_blocks(request, placement.threads, num_readers, network, num_networks, gpu=network), opened
                )
                for network in range(num_networks)
            ]
        )


def predict_blocks(
    request: PredictRequest, num_threads: int, num_readers: int, first: int = 0, stride: int = 1, *, gpu: int = 0
) -> Iterator[pa.Table]:
    """Predict every ``stride``-th block, from block ``first`` on, with one network; yield the same as predict_here.

    ``num_readers`` threads read images ahead, each with a process that decodes them. The network computes with
    ``num_threads`` threads, or on the GPU with the number ``gpu``.
    """

    def read(reader: int) -> Iterator[tuple[Manifest, Pixels, dict[int, str]]]:
        # Yield the rows of each block, the images, and for each that cannot be read its position and the reason.
        # Images are decoded in a process of its own, because a bad one might kill this process.
        with ImageReader(request.images, *request.format, isolated=True) as image_reader:
            for manifest in request.blocks(first + reader * stride, num_readers * stride):
                yield manifest, *image_reader.read(manifest)

    # The readers start before the network is loaded, which takes a while.
    with ExitStack() as opened:
        blocks = [_ahead(read(reader), opened) for reader in range(num_readers)]
        predict = request.load_predictor(request.run_store, num_threads, gpu)
        for manifest, pixels, reasons in in_turn(blocks):
            errors = string_array([reasons.get(position) for position in range(len(manifest))])
            predictions = predict(pixels, manifest.labels.astype(np.int64))
            yield predictions.append_column("key", manifest.keys.cast(pa.string())).append_column("error", errors)


def in_turn(sources: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each source in turn, until the source whose turn it is has none left."""
    for source in cycle(sources):
        try:
            yield next(source)
        except StopIteration:
            return


def _ahead(items: Iterator[T], opened: ExitStack) -> Iterator[T]:
    """Return ``items``, each produced before it is needed by a thread, which ends when ``opened`` is closed."""
    produced = Prefetch(items, _AHEAD)
    opened.callback(produced.close, _CLOSE_S)
    return produced
