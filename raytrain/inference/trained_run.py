"""A stored run with a checkpoint, to be turned into a network."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import cast

import pyarrow as pa

from raytrain import recipes
from raytrain.config import ResolvedConfig
from raytrain.config.evaluation import TestView
from raytrain.config.user_function import names_own_function, stored_function_error
from raytrain.data.dataset import evaluation_format
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.inference.predictor import Predictor
from raytrain.launch.placement import Hardware, Placement, machine_hardware, place
from raytrain.launch.predict_request import PredictRequest, predict_here
from raytrain.launch.ray.connection import Connection, uses_cluster
from raytrain.launch.ray.hardware import cluster_hardware
from raytrain.runs.checkpoint_files import require_checkpoint
from raytrain.runs.documents import CLASSES, CONFIG, matches, open_run, read_resolved_config
from raytrain.storage.store import Store


def read_trusted_config(store: Store, *, trust: bool) -> ResolvedConfig:
    """The run's options. Raises UsageError if they name code of the run's author, unless the user says ``trust``."""
    config = read_resolved_config(store)
    if not trust and names_own_function(config.model):
        raise stored_function_error("model", config.model, f"{store.url}/{CONFIG}", may_be_named=False)
    return config


@dataclass(frozen=True)
class TrainedRun:
    """A run with a checkpoint, the best one's path; ``trust`` allows a network that is a function of its author."""

    name: str
    store: Store
    config: ResolvedConfig
    classes: tuple[str, ...]
    checkpoint: str
    trust: bool

    def predict(
        self,
        images: Store,
        manifest: Manifest,
        *,
        workers: int | None,
        address: str | None,
        test_views: Collection[TestView],
        top_k: int = 1,
    ) -> pa.Table:
        """Predict the manifest's images, which are in the store ``images``: a row for each, in the manifest's order.

        The cluster at ``address`` does it, or one that a command here would join; without any, this process does. The
        columns are those of :func:`raytrain.launch.predict_request.predict_here`.
        """
        load_predictor = partial(Predictor, run=self.name, top_k=top_k, trust=self.trust, test_views=test_views)
        request = PredictRequest(images, manifest, evaluation_format(self.config), self.store, load_predictor)
        if uses_cluster(address):
            return self._predict_on_cluster(request, workers, address)
        found = machine_hardware()
        return pa.concat_tables(predict_here(request, self._place(workers or max(1, int(found.gpus)), found)))

    def _predict_on_cluster(self, request: PredictRequest, workers: int | None, address: str | None) -> pa.Table:
        with Connection(address) as cluster:
            cluster.connect()
            from raytrain.launch.ray.predict_images import predict_images  # imports Ray

            placement = self._place(workers or "auto", cluster_hardware())
            return pa.concat_tables(predict_images(request, placement, scope_keys=self.config.scope_keys))

    def _place(self, workers: int | str, found: Hardware) -> Placement:
        return place(recipes.custom(workers=workers, threads_per_worker=self.config.threads_per_worker), found)


def open_trained_run(run: str, storage: str, *, trust: bool) -> TrainedRun:
    """Open a run that has a checkpoint; UsageError if it has none, or an own network without ``trust``."""
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
