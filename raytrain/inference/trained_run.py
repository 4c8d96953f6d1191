"""A run that has a checkpoint, and its predictions for the images of a manifest, computed on a Ray cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import cast

import pyarrow as pa

from raytrain import recipes
from raytrain.backends.placement import place
from raytrain.backends.ray.connection import connection
from raytrain.backends.ray.hardware import cluster_hardware
from raytrain.config import ResolvedConfig
from raytrain.data.dataset import evaluation_format
from raytrain.data.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.inference.predictor import Predictor
from raytrain.inference.trusted_config import read_trusted_config
from raytrain.runs.checkpoint_files import require_checkpoint
from raytrain.runs.documents import open_run
from raytrain.runs.layout import CLASSES
from raytrain.runs.stored_values import matches
from raytrain.storage.base import Store


@dataclass(frozen=True)
class TrainedRun:
    """A run with a checkpoint. ``checkpoint`` is the path of its best one within the run's store.

    ``trust`` allows its network to be a function of whoever wrote the run.
    """

    name: str
    store: Store
    config: ResolvedConfig
    classes: tuple[str, ...]
    checkpoint: str
    trust: bool

    def predict(
        self, images: Store, manifest: Manifest, *, workers: int | None, address: str | None, top_k: int = 1
    ) -> pa.Table:
        """Predict the classes of the manifest's images, which are in the store ``images``.

        Returns:
            A row for each image, in the manifest's order, with the columns key, error (why the image could not be read,
            else null) and those of :class:`raytrain.inference.predictor.Predictor`, which mean nothing if there is an
            error.

        Raises:
            UsageError: there is no cluster at ``address``, or it is too small for ``workers``.
        """
        with connection(address) as cluster:
            cluster.connect()
            from raytrain.backends.ray.predict_images import predict_images  # imports Ray

            threads = self.config.threads_per_worker
            options = recipes.custom(workers=workers or "auto", threads_per_worker=threads)
            tables = predict_images(
                images,
                manifest,
                evaluation_format(self.config),
                run_store=self.store,
                load_predictor=partial(Predictor, run=self.name, top_k=top_k, trust=self.trust),
                placement=place(options, cluster_hardware()),
                scope_keys=self.config.scope_keys,
            )
            return pa.concat_tables(tables)


def open_trained_run(run: str, storage: str, *, trust: bool) -> TrainedRun:
    """Open a run that has a checkpoint. Raises UsageError if there is no such run, it has no checkpoint, or its network
    is a function of its author's and the user does not ``trust`` the run.
    """
    store = open_run(storage, run)
    config = read_trusted_config(store, trust=trust)
    checkpoint = require_checkpoint(store, run)
    return TrainedRun(run, store, config, _read_classes(store), checkpoint, trust)


def _read_classes(store: Store) -> tuple[str, ...]:
    try:
        classes: object = json.loads(store.get(CLASSES))
    except (FileNotFoundError, ValueError, RecursionError):
        classes = None
    if not matches(classes, list[str]):
        raise UsageError(f"{store.url}/{CLASSES} cannot be used: it must be a JSON list of the names of the classes.")
    return tuple(cast(list[str], classes))
