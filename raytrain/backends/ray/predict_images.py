"""Predict the images of a manifest with Ray Data: tasks read the images, actors hold the network."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray
import ray.data

from raytrain.backends.placement import Placement
from raytrain.backends.ray.credential_server import serving_credentials
from raytrain.backends.ray.ingest import ImageSet, chosen, configure, to_block, to_table
from raytrain.backends.ray.private_api import is_repeated_task
from raytrain.data.decode import ImageFormat, ImageShape, Pixels
from raytrain.data.image_reader import ImageReader
from raytrain.data.manifest import Manifest
from raytrain.data.permutation import Int64s
from raytrain.storage.base import Store
from raytrain.storage.scoped_credentials import Scope


class BlockPredictor(Protocol):
    """Returns a table with a row for each of ``images``, uint8 (n, H, W, C), whose classes are ``labels`` (n,)."""

    def __call__(self, images: Pixels, labels: Int64s) -> pa.Table: ...


class LoadPredictor(Protocol):
    """Loads a predictor from the store of a run. Pickled to the actors."""

    def __call__(self, store: Store, num_threads: int) -> BlockPredictor: ...


def predict_images(
    images: Store,
    manifest: Manifest,
    format: ImageFormat,
    *,
    run_store: Store,
    load_predictor: LoadPredictor,
    placement: Placement,
    scope_keys: bool,
) -> Iterator[pa.Table]:
    """Predict all images of ``manifest`` on ``placement.num_workers`` actors of the connected cluster.

    With ``scope_keys``, the credentials that they are lent are good for reading the images and the run only.

    Yields:
        Tables in the manifest's order with the columns key, error (why the image could not be read, else null) and
        those of the predictor, which mean nothing if there is an error.
    """
    scope = Scope(reads=(f"{images.url}/", f"{run_store.url}/"), writes=()) if scope_keys else None
    with serving_credentials([images, run_store], scope) as (served, lender):
        packed = manifest.packing is not None
        store = images.with_lent_credentials(served)
        image_set = ImageSet(store, format, ray.put(manifest), len(manifest), packed)
        actor_arguments = load_predictor, run_store.with_lent_credentials(served), placement.threads, format.shape
        for table in _pipeline(image_set, actor_arguments, placement).iter_batches(
            batch_size=None, batch_format="pyarrow"
        ):
            yield table
            if lender is not None:
                lender.lend_if_due()


def read_numbered_block(row: dict[str, Any], images: ImageSet) -> pa.Table:
    """Read one block of images; ``row["id"][0]`` is its number.

    Returns:
        The columns of :func:`raytrain.backends.ray.ingest.to_table`, key, and error (null if the image could be read).
    """
    start = int(row["id"][0]) * images.rows_per_block
    samples = np.arange(start, min(start + images.rows_per_block, images.num_images), dtype=np.int64)
    wanted = chosen(images, samples)
    reader = ImageReader(images.store, *images.format, isolated=is_repeated_task())
    pixels, bad = reader.read(wanted)
    errors = pa.array([bad.get(position) for position in range(len(wanted))], pa.string())
    table = to_table(pixels, wanted.labels.astype(np.int64), samples)
    return table.append_column("key", wanted.keys.cast(pa.string())).append_column("error", errors)


class _PredictorActor:
    """A predictor in a process of its own."""

    def __init__(self, load_predictor: LoadPredictor, run_store: Store, num_threads: int, shape: ImageShape) -> None:
        self._predict = load_predictor(run_store, num_threads)
        self._shape = shape

    def __call__(self, table: pa.Table) -> pa.Table:
        """Predict the images that :func:`read_numbered_block` read."""
        block = to_block(table, self._shape)
        predictions = self._predict(block.images, block.labels)
        return predictions.append_column("key", table["key"]).append_column("error", table["error"])


def _pipeline(images: ImageSet, actor_arguments: tuple[Any, ...], placement: Placement) -> ray.data.Dataset:
    configure(ray.data.DataContext.get_current(), (placement.cpus + placement.data_cpus) * placement.num_workers)
    num_blocks = -(-images.num_images // images.rows_per_block)
    return (
        ray.data.range(num_blocks, override_num_blocks=num_blocks)
        .map_batches(
            partial(read_numbered_block, images=images),  # pyright: ignore[reportArgumentType]
            batch_size=1,
            num_cpus=placement.task_cpus,
            zero_copy_batch=True,
        )
        .map_batches(
            _PredictorActor,
            fn_constructor_args=actor_arguments,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=placement.cpus,
            num_gpus=1 if placement.device == "cuda" else 0,
            compute=ray.data.ActorPoolStrategy(size=placement.num_workers),
        )
    )
