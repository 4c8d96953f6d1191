"""What is predicted, and how a block of it is, on a cluster and on this machine. Imports neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from raytrain.data.arrow_arrays import string_array
from raytrain.data.block_order import rows_per_block
from raytrain.data.blocks import to_block, to_table
from raytrain.data.decode import ImageFormat, ImageShape, Pixels
from raytrain.data.manifest import Manifest
from raytrain.data.permutation import Int64s
from raytrain.storage.base import Store


class BlockPredictor(Protocol):
    """Returns a table with a row for each of ``images``, uint8 (n, H, W, C), whose classes are ``labels`` (n,)."""

    def __call__(self, images: Pixels, labels: Int64s) -> pa.Table: ...


class LoadPredictor(Protocol):
    """Loads a predictor from the store of a run. It computes on the GPU of that number, if there is one; else with so
    many threads. Pickled to the actors of a cluster.
    """

    def __call__(self, store: Store, num_threads: int, gpu: int) -> BlockPredictor: ...


@dataclass(frozen=True)
class PredictRequest:
    """All images of ``manifest``, which are in the store ``images``, and the network of the run in ``run_store``."""

    images: Store
    manifest: Manifest
    format: ImageFormat
    run_store: Store
    load_predictor: LoadPredictor

    @property
    def num_blocks(self) -> int:
        """Blocks of images."""
        return -(-len(self.manifest) // self.rows_per_block)

    @property
    def rows_per_block(self) -> int:
        """Images in one block, but for the last one."""
        return rows_per_block(self.format.shape.num_bytes, packed=self.manifest.packing is not None)


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
        """What is said of an image, as JSON: ``label`` and ``score``, or ``labels`` if it may have several classes, and
        the likeliest ``classes``. ``row`` is one of the predictor's.
        """
        if self.thresholds is None:
            suffixes = ["", *(f"_{rank}" for rank in range(2, self.top_k + 1))]
            likeliest = [{"label": row[f"label{suffix}"], "score": row[f"score{suffix}"]} for suffix in suffixes]
            return {**likeliest[0], "classes": likeliest}
        columns = zip(self.classes, row["probabilities"], self.thresholds, strict=True)
        ranked = sorted(columns, key=lambda column: column[1], reverse=True)
        labels = [label for label, score, threshold in ranked if score >= threshold]
        keys = ("label", "score", "threshold")
        return {"labels": labels, "classes": [dict(zip(keys, each, strict=True)) for each in ranked[: self.top_k]]}


def samples_of_block(number: int, rows_per_block: int, num_images: int) -> Int64s:
    """Which images block ``number`` has: their places in the manifest."""
    return np.arange(number * rows_per_block, min((number + 1) * rows_per_block, num_images), dtype=np.int64)


def image_table(wanted: Manifest, pixels: Pixels, bad: dict[int, str]) -> pa.Table:
    """The images of ``wanted`` as :class:`raytrain.data.image_reader.ImageReader` reads them.

    Returns:
        The columns of :func:`raytrain.data.blocks.to_table`, key, and error (null if the image could be read).
    """
    errors = string_array([bad.get(position) for position in range(len(wanted))])
    table = to_table(pixels, wanted.labels.astype(np.int64), np.arange(len(wanted), dtype=np.int64))
    return table.append_column("key", wanted.keys.cast(pa.string())).append_column("error", errors)


def predict_table(predict: BlockPredictor, images: pa.Table, shape: ImageShape) -> pa.Table:
    """The columns of the predictor, key and error, for a table of :func:`image_table`."""
    block = to_block(images, shape)
    predictions = predict(block.images, block.labels)
    return predictions.append_column("key", images["key"]).append_column("error", images["error"])
