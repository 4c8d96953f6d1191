"""A stored run with a checkpoint, which predicts images on this machine or on a cluster.

``evaluate``, ``predict`` and ``serve`` open a :class:`TrainedRun` first. Its network does not travel: a
:class:`PredictRequest` carries a function that makes a :class:`~raytrain.inference.predictor.Predictor` wherever images
are predicted (in this process, in an actor of a cluster or in a replica of Ray Serve), and each loads the checkpoint
itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import pyarrow as pa

from raytrain import recipes
from raytrain.config import ResolvedConfig
from raytrain.config.evaluation import TestView
from raytrain.config.option_values import matches
from raytrain.data.dataset import evaluation_format
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError, current_folder
from raytrain.inference.predictor import Predictor
from raytrain.launch.placement import Hardware, Placement, machine_hardware, place
from raytrain.launch.predict_blocks import PredictRequest, predict_here
from raytrain.launch.ray.connection import Connection, names_cluster, uses_cluster
from raytrain.launch.ray.nodes import cluster_hardware
from raytrain.runs.documents import CLASSES, open_run, read_trusted_config
from raytrain.runs.stored_checkpoints import require_checkpoint
from raytrain.storage.store import Store


@dataclass(frozen=True)
class TrainedRun:
    """A stored run that has a checkpoint.

    ``checkpoint`` is the path of its best checkpoint within the run. ``trust`` allows code of the run's author, such as
    a function that builds the network.
    """

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
        as_measured: bool = False,
        embeddings: bool = False,
    ) -> pa.Table:
        """Predict the manifest's images, which are in the store ``images``: a row for each, in the manifest's order.

        The cluster at ``address`` does the work, or else, if there is more than one block of images, a running cluster
        that commands on this machine join; otherwise this process does it. The columns are those of
        :func:`raytrain.launch.predict_blocks.predict_here`. With ``as_measured``, images are predicted in the
        precision in which the run evaluated itself, and if its options name further metrics, there is the column
        ``probabilities`` that these need. ``embeddings`` adds a column ``embedding``.

        Without ``workers``, there are as many networks as GPUs on this machine, at least one, or as many as the cluster
        has room for. Raises UsageError if there is too little room, or for a wrong name in ``test_views``.
        """
        views = replace(self.config, test_views=test_views).test_views  # the options check them
        load_predictor = partial(
            Predictor,
            run=self.name,
            top_k=top_k,
            test_views=views,
            trust=self.trust,
            as_measured=as_measured,
            gives_all=as_measured and bool(self.config.named_metrics),
            embeddings=embeddings,
        )
        request = PredictRequest(images, manifest, evaluation_format(self.config), self.store, load_predictor)

        # Without a cluster: a network on each GPU of this machine, or one on its CPUs. A single block of images, which
        # a cluster could not share out, is predicted here, too, unless the user has named the cluster.
        is_shared = len(manifest) > manifest.rows_per_block(request.format.shape)
        if not uses_cluster(address) or not (is_shared or names_cluster(address)):
            hardware = machine_hardware()
            placement = self.placement(max(1, int(hardware.gpus)) if workers is None else workers, hardware)
            return pa.concat_tables(predict_here(request, placement))

        # On a cluster: as many actors as it has room for.
        with Connection(address) as cluster:
            cluster.connect()
            from raytrain.launch.ray.predict_images import predict_images  # imports Ray

            placement = self.placement("auto" if workers is None else workers, cluster_hardware())
            return pa.concat_tables(predict_images(request, placement, scope_keys=self.config.scope_keys))

    def placement(self, workers: int | str, hardware: Hardware) -> Placement:
        """Return where ``workers`` networks run on the hardware; "auto" is as many as there is room for."""
        return place(recipes.custom(workers=workers, threads_per_worker=self.config.threads_per_worker), hardware)


def open_trained_run(run: str, storage: str, *, trust: bool) -> TrainedRun:
    """Open a run that has a checkpoint.

    Raise UsageError if there is no such run, if it has no checkpoint or no list of classes, or if its network is a
    function of its author and the user does not ``trust`` it.
    """
    current_folder()  # raises UsageError if there is none: without one, MKL ends the process that imports torch
    store = open_run(storage, run)
    config = read_trusted_config(store, trust=trust)
    checkpoint = require_checkpoint(store, run)

    # The list of classes may be damaged, or written by somebody else.
    try:
        classes: object = json.loads(store.get(CLASSES))
    except (FileNotFoundError, ValueError, RecursionError):
        classes = None
    if not matches(classes, list[str]):
        raise UsageError(f"{store.url}/{CLASSES} cannot be used: it must be a JSON list of the names of the classes.")
    return TrainedRun(run, store, config, tuple(cast(list[str], classes)), checkpoint, trust)
