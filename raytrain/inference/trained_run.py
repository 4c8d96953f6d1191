"""A stored run with a checkpoint, and its network as it predicts blocks of images, on a GPU if there is one.

``evaluate``, ``predict`` and ``serve`` open a :class:`TrainedRun` first. Its network does not travel: a
:class:`PredictRequest` carries a function that makes a :class:`Predictor` wherever images are predicted (in this
process, in an actor of a cluster or in a replica of Ray Serve), and each loads the checkpoint itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain import recipes
from raytrain.config import ResolvedConfig
from raytrain.config.evaluation import TestView
from raytrain.config.values import matches
from raytrain.data.blocks import number_array, string_array
from raytrain.data.dataset import evaluation_format
from raytrain.data.images.crop_box import Pixels
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError, current_folder
from raytrain.launch.placement import Hardware, Placement, machine_hardware, place
from raytrain.launch.predict_blocks import PredictRequest, predict_here
from raytrain.launch.ray.connection import Connection, names_cluster, uses_cluster
from raytrain.launch.ray.nodes import cluster_hardware
from raytrain.runs.checkpoint_files import require_checkpoint
from raytrain.runs.documents import CLASSES, open_run, read_trusted_config
from raytrain.storage.store import Store
from raytrain.training.networks.precision import set_gpu_products

if TYPE_CHECKING:
    import torch

_BATCH_SIZE = 256  # images that the network sees at a time


class Predictor:
    """Predicts the ``top_k`` likeliest classes of images, on a GPU or, if there is none, on the CPU."""

    def __init__(
        self,
        store: Store,
        num_threads: int,
        gpu: int = 0,
        *,
        run: str,
        top_k: int,
        test_views: Collection[TestView] = (),
        trust: bool = False,
        as_measured: bool = False,
        gives_all: bool = False,
        embeddings: bool = False,
    ) -> None:
        """Load the best checkpoint of the run called ``run`` from its ``store``; for ``trust`` see raytrain.load.

        It computes on the GPU of number ``gpu``, and sets ``num_threads`` as the threads of torch in this process.

        Logits are averaged over ``test_views`` of each image, and over those that the run was trained with. They are
        computed in float32 like those of the network that ``raytrain.load`` returns; with ``as_measured`` in the
        precision in which the run evaluated itself. With ``gives_all`` the table has the probabilities of all classes,
        with ``embeddings`` what the body of the network gives to its head.
        """
        # torch is imported here: whoever opens a run to send this predictor elsewhere does without it.
        import torch

        from raytrain.inference.classifier import load_classifier
        from raytrain.training.networks.autocast import prepare_for_autocast

        torch.set_num_threads(num_threads)
        self._device = torch.device(f"cuda:{gpu}" if torch.cuda.is_available() else "cpu")
        self._classifier = load_classifier(store, run, trust=trust).to(self._device)
        self._classifier.test_views |= set(test_views)

        # In 16 bits a network needs preparation, and a GPU multiplies as exactly as the precision asks for.
        self._precision = self._classifier.precision if as_measured else "float32"
        prepare_for_autocast(self._classifier.network, self._precision)
        if self._device.type == "cuda":
            set_gpu_products(self._precision)
        if embeddings:
            from raytrain.inference.embeddings import NetworkWithEmbeddings

            num_classes = len(self._classifier.classes)
            self._classifier.network = NetworkWithEmbeddings(self._classifier.network, num_classes)
        self._top_k = top_k
        self._gives_all = gives_all

    def __call__(self, images: Pixels, labels: npt.NDArray[np.int64]) -> pa.Table:
        """Predict ``images``, uint8 (n, H, W, C), whose true classes are ``labels`` (n,), negative if unknown.

        The columns are label and score (name and probability of the likeliest class), label_2, score_2 and so on, truth
        and answer (the true and the likeliest class as numbers), loss (cross entropy) and, with ``gives_all``,
        probabilities, a list with a number for each class. If an image may have several classes, there are only truth
        and probabilities. With ``embeddings``, there is a column embedding, too: a list of float32.
        """
        import torch
        from torch.nn.functional import cross_entropy

        from raytrain.training.networks.autocast import mixed_precision

        # The network sees a few hundred images at a time; its outputs are collected on the CPU. They are logits and,
        # with embeddings, D numbers more.
        batches: list[torch.Tensor] = []
        for start in range(0, len(images), _BATCH_SIZE):
            with torch.no_grad(), mixed_precision(self._precision, self._device):
                pixels = torch.from_numpy(images[start : start + _BATCH_SIZE].copy()).to(self._device)
                batches.append(self._classifier(pixels).double().cpu())
        outputs = torch.cat(batches)  # float64 (n, num_classes + D)
        logits, embeddings = outputs.tensor_split([len(self._classifier.classes)], dim=1)
        probabilities = self._classifier.probabilities_of(logits).numpy()

        # Columns of lists, each with as many numbers for each image.
        probability_lists = pa.FixedSizeListArray.from_arrays(
            number_array(probabilities.ravel()), probabilities.shape[1]
        )
        further_columns: dict[str, Any] = {}
        if size := embeddings.shape[1]:
            numbers = number_array(embeddings.float().numpy().ravel())
            further_columns["embedding"] = pa.FixedSizeListArray.from_arrays(numbers, size)

        # Several classes per image: the caller compares the probabilities with thresholds.
        if self._classifier.thresholds is not None:
            return pa.table({"truth": number_array(labels), "probabilities": probability_lists, **further_columns})

        # One class per image: two columns for each of the likeliest classes; equal scores are in the order of classes.
        likeliest = np.argsort(-probabilities, axis=1, kind="stable")[:, : self._top_k]  # (n, top_k)
        rows = np.arange(len(images))
        names = string_array(self._classifier.classes)
        likeliest_columns: dict[str, Any] = {}
        for rank in range(self._top_k):
            suffix = f"_{rank + 1}" if rank else ""
            chosen = likeliest[:, rank]
            likeliest_columns[f"label{suffix}"] = names.take(number_array(chosen))
            likeliest_columns[f"score{suffix}"] = number_array(probabilities[rows, chosen].astype(np.float32))

        # Columns for an evaluation. The loss of an image whose class is unknown has no meaning, and is not read.
        loss = cross_entropy(logits, torch.from_numpy(labels.clip(min=0)), reduction="none").numpy()
        measured = {"truth": labels, "answer": likeliest[:, 0], "loss": loss}
        if self._gives_all:
            further_columns["probabilities"] = probability_lists
        measured_columns = {name: number_array(values) for name, values in measured.items()}
        return pa.table({**likeliest_columns, **measured_columns, **further_columns})


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
