"""Predict images on this machine without Ray: threads read blocks ahead, and predict one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import TypeVar

import pyarrow as pa

from raytrain.backends.machine_batches import num_decoders
from raytrain.backends.placement import Placement
from raytrain.backends.predict_request import PredictRequest, image_table, predict_table, samples_of_block
from raytrain.data.image_reader import ImageReader
from raytrain.data.prefetch import Prefetch

T = TypeVar("T")

_AHEAD = 1  # blocks of each thread, besides the one that it works at
_CLOSE_S = 10.0


def predict_images(request: PredictRequest, placement: Placement) -> Iterator[pa.Table]:
    """Predict with ``placement.num_workers`` networks, each on a GPU of its own or with its share of the cores.

    Yields what :func:`raytrain.backends.ray.predict_images.predict_images` does.
    """
    workers = placement.num_workers
    num_readers = workers * max(1, num_decoders() // workers)
    with ExitStack() as opened:

        def ahead(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
            produced = Prefetch(tables, _AHEAD)
            opened.callback(produced.close, _CLOSE_S)
            return produced

        # Reader i has blocks i, i + num_readers, …, and worker i the readers i, i + workers, …: the order is kept.
        readers = [ahead(_read(request, first, num_readers)) for first in range(num_readers)]
        sources = [_in_turn(readers[worker::workers]) for worker in range(workers)]
        yield from _in_turn([ahead(_predict(request, placement, *each)) for each in enumerate(sources)])


def _read(request: PredictRequest, first: int, stride: int) -> Iterator[pa.Table]:
    """Every ``stride``-th block from ``first`` on, as :func:`image_table` returns it.

    Images are decoded in a process of their own: nobody would start this one again if an image killed it.
    """
    reader = ImageReader(request.images, *request.format, isolated=True)
    numbers = range(first, request.num_blocks, stride)
    manifest = request.manifest
    blocks = [manifest.select(samples_of_block(number, request.rows_per_block, len(manifest))) for number in numbers]
    for wanted, (pixels, bad) in zip(blocks, reader.read_each(blocks), strict=True):
        yield image_table(wanted, pixels, bad)


def _predict(
    request: PredictRequest, placement: Placement, worker: int, tables: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    predict = request.load_predictor(request.run_store, placement.threads, worker)
    for table in tables:
        yield predict_table(predict, table, request.format.shape)


def _in_turn(sources: Sequence[Iterator[T]]) -> Iterator[T]:
    """One item of each source after the other, until the next one has none."""
    for source in cycle(sources):
        try:
            yield next(source)
        except StopIteration:
            return
