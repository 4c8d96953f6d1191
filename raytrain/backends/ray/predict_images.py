"""Predict images with Ray Data: tasks read the images, actors hold the network."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data

from raytrain.backends.placement import Placement
from raytrain.backends.predict_request import (
    LoadPredictor,
    PredictRequest,
    image_table,
    predict_table,
    samples_of_block,
)
from raytrain.backends.ray.credential_server import serving_credentials
from raytrain.backends.ray.image_pipeline import configure
from raytrain.backends.ray.ingest import ImageSet, chosen
from raytrain.backends.ray.private_api import is_repeated_task
from raytrain.data.decode import ImageShape
from raytrain.data.image_reader import ImageReader
from raytrain.storage.base import Store
from raytrain.storage.lent_credentials import Scope


def predict_images(request: PredictRequest, placement: Placement, *, scope_keys: bool) -> Iterator[pa.Table]:
    """Predict on ``placement.num_workers`` actors of the connected cluster.

    With ``scope_keys``, the credentials that they are lent are good for reading the images and the run only.

    Yields:
        Tables in the manifest's order with the columns key, error (why the image could not be read, else null) and
        those of the predictor, which mean nothing if there is an error.
    """
    images, run_store, manifest = request.images, request.run_store, request.manifest
    scope = Scope(reads=(f"{images.url}/", f"{run_store.url}/"), writes=()) if scope_keys else None
    with serving_credentials([images, run_store], scope) as (served, lender):
        packed = manifest.packing is not None
        store = images.with_lent_credentials(served)
        image_set = ImageSet(store, request.format, ray.put(manifest), len(manifest), packed)
        shape = request.format.shape
        actor_arguments = request.load_predictor, run_store.with_lent_credentials(served), placement.threads, shape
        tables = _pipeline(image_set, request.num_blocks, actor_arguments, placement)
        for table in tables.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield table
            if lender is not None:
                lender.lend_if_due()


def read_numbered_block(row: dict[str, Any], images: ImageSet) -> pa.Table:
    """Read one block of images, as :func:`image_table` returns it; ``row["id"][0]`` is its number."""
    wanted = chosen(images, samples_of_block(int(row["id"][0]), images.rows_per_block, images.num_images))
    reader = ImageReader(images.store, *images.format, isolated=is_repeated_task())
    return image_table(wanted, *reader.read(wanted))


class _PredictorActor:
    """A predictor in a process of its own, which sees no other GPU than its own."""

    def __init__(self, load_predictor: LoadPredictor, run_store: Store, num_threads: int, shape: ImageShape) -> None:
        self._predict = load_predictor(run_store, num_threads, 0)
        self._shape = shape

    def __call__(self, table: pa.Table) -> pa.Table:
        """Predict the images that :func:`read_numbered_block` read."""
        return predict_table(self._predict, table, self._shape)


def _pipeline(
    images: ImageSet, num_blocks: int, actor_arguments: tuple[Any, ...], placement: Placement
) -> ray.data.Dataset:
    configure(ray.data.DataContext.get_current(), (placement.cpus + placement.data_cpus) * placement.num_workers)
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
