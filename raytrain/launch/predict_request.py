"""Predicting images: what is asked for, and threads that read blocks of images ahead of a network.

A process does all of it, or each actor of a cluster does a share of the blocks. Imports neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from raytrain.data.blocks import Prefetch, string_array
from raytrain.data.images.decode import ImageFormat, Pixels
from raytrain.data.images.image_reader import ImageReader
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.placement import Placement, cores
from raytrain.storage.store import Store

T = TypeVar("T")

_AHEAD = 1  # blocks of each thread, besides the one that it works at
_CLOSE_S = 10.0
_MAX_READERS = 8  # more of them would keep the network from the interpreter


BlockPredictor = Callable[[Pixels, Int64s], pa.Table]
"""Returns a table with a row for each of the images, uint8 (n, H, W, C), whose classes are the labels (n,)."""
LoadPredictor = Callable[[Store, int, int], BlockPredictor]
"""Loads a predictor from the store of a run, with a number of threads, or on the GPU of a number. Can be pickled."""


@dataclass(frozen=True)
class PredictRequest:
    """All images of ``manifest``, which are in the store ``images``, and the network of the run in ``run_store``."""

    images: Store
    manifest: Manifest
    format: ImageFormat
    run_store: Store
    load_predictor: LoadPredictor

    def blocks(self, first: int, stride: int) -> list[Manifest]:
        """Every ``stride``-th block of images, from block ``first`` on."""
        rows, count = self.manifest.rows_per_block(self.format.shape), len(self.manifest)
        starts = range(first * rows, count, stride * rows)
        return [self.manifest.select(np.arange(start, min(start + rows, count))) for start in starts]


@dataclass(frozen=True)
class ServedModel:
    """A network that answers requests with its ``top_k`` likeliest classes: that of ``run``, loaded from ``store``.

    ``thresholds`` are the probability of each class from which on an image has it; None if an image has one class.
    """

    run: str
    checkpoint: str
    classes: tuple[str, ...]
    format: ImageFormat
    store: Store
    load_predictor: LoadPredictor
    top_k: int
    thresholds: tuple[float, ...] | None = None

    def answer(self, row: dict[str, Any]) -> dict[str, Any]:
        """The answer as JSON for a row of the predictor: ``label`` and ``score``, or ``labels``; and ``classes``."""
        if self.thresholds is None:
            suffixes = ["", *(f"_{rank}" for rank in range(2, self.top_k + 1))]
            likeliest = [{"label": row[f"label{suffix}"], "score": row[f"score{suffix}"]} for suffix in suffixes]
            return {**likeliest[0], "classes": likeliest}
        columns = zip(self.classes, row["probabilities"], self.thresholds, strict=True)
        ranked = sorted(columns, key=lambda column: column[1], reverse=True)
        labels = [label for label, score, threshold in ranked if score >= threshold]
        keys = ("label", "score", "threshold")
        return {"labels": labels, "classes": [dict(zip(keys, each, strict=True)) for each in ranked[: self.top_k]]}


def predict_here(request: PredictRequest, placement: Placement) -> Iterator[pa.Table]:
    """Predict with ``placement.num_workers`` networks here, each on a GPU of its own or with its share of the cores.

    Yields tables in the manifest's order with the columns key, error (why the image could not be read, else null) and
    those of the predictor, which mean nothing if there is an error.
    """
    workers = placement.num_workers
    readers = max(1, min(_MAX_READERS, cores()) // workers)
    with ExitStack() as opened:
        yield from in_turn(
            [
                _ahead(predict_blocks(request, placement.threads, readers, worker, workers, gpu=worker), opened)
                for worker in range(workers)
            ]
        )


def predict_blocks(
    request: PredictRequest, num_threads: int, num_readers: int, first: int = 0, stride: int = 1, *, gpu: int = 0
) -> Iterator[pa.Table]:
    """Predict every ``stride``-th block from block ``first`` on with one network; see :func:`predict_here`."""
    with ExitStack() as opened:
        each = range(num_readers)  # reader i has the blocks i, i + num_readers, … of these: the order is kept
        tables = [_ahead(_read(request, first + i * stride, num_readers * stride), opened) for i in each]
        predict = request.load_predictor(request.run_store, num_threads, gpu)
        for wanted, pixels, bad in in_turn(tables):
            errors = string_array([bad.get(position) for position in range(len(wanted))])
            predictions = predict(pixels, wanted.labels.astype(np.int64))
            yield predictions.append_column("key", wanted.keys.cast(pa.string())).append_column("error", errors)


def in_turn(sources: Sequence[Iterator[T]]) -> Iterator[T]:
    """One item of each source after the other, until the next one has none."""
    for source in cycle(sources):
        try:
            yield next(source)
        except StopIteration:
            return


def _read(request: PredictRequest, first: int, stride: int) -> Iterator[tuple[Manifest, Pixels, dict[int, str]]]:
    """Images, their pixels, and why some cannot be read.

    They are decoded in a process of their own: nobody would start this one again if an image killed it.
    """
    with ImageReader(request.images, *request.format, isolated=True) as reader:
        for wanted in request.blocks(first, stride):
            yield wanted, *reader.read(wanted)


def _ahead(items: Iterator[T], opened: ExitStack) -> Iterator[T]:
    """``items``, produced ahead by a thread that ends with ``opened``."""
    produced = Prefetch(items, _AHEAD)
    opened.callback(produced.close, _CLOSE_S)
    return produced
