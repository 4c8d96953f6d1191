"""A stored run with a checkpoint, and its network as it predicts blocks of images, on a GPU if there is one."""

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
from raytrain.config.user_code import names_own_function, stored_function_error
from raytrain.config.values import matches
from raytrain.data.blocks import number_array, string_array
from raytrain.data.dataset import evaluation_format
from raytrain.data.images.decode import Pixels
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.launch.placement import Hardware, Placement, machine_hardware, place
from raytrain.launch.predict_request import PredictRequest, predict_here
from raytrain.launch.ray.connection import Connection, uses_cluster
from raytrain.launch.ray.nodes import cluster_hardware
from raytrain.runs.checkpoint_files import require_checkpoint
from raytrain.runs.documents import CLASSES, CONFIG, open_run, read_resolved_config
from raytrain.storage.store import Store
from raytrain.training.precision import set_gpu_products

if TYPE_CHECKING:
    import torch

_BATCH_SIZE = 256


class Predictor:
    """Predicts the ``top_k`` likeliest classes of images: on the GPU of number ``gpu``, if there are any."""

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
    ) -> None:
        """Load the best checkpoint of the run called ``run`` from its ``store``; for ``trust`` see raytrain.load.

        Logits are averaged over ``test_views`` of each image, and over those that the run was trained with. They are
        computed as by the network that ``raytrain.load`` returns, or ``as_measured``: in the run's precision.
        """
        import torch

        from raytrain.inference.classifier import load_classifier
        from raytrain.training.autocast import prepare_for_autocast

        torch.set_num_threads(num_threads)
        self._device = torch.device(f"cuda:{gpu}" if torch.cuda.is_available() else "cpu")
        self._classifier = load_classifier(store, run, trust=trust).to(self._device)
        self._classifier.test_views |= set(test_views)
        self._precision = self._classifier.precision if as_measured else "float32"
        prepare_for_autocast(self._classifier.network, self._precision)
        if self._device.type == "cuda":
            set_gpu_products(self._precision)
        self._top_k = top_k

    def __call__(self, images: Pixels, labels: npt.NDArray[np.int64]) -> pa.Table:
        """Predict ``images``, uint8 (n, H, W, C), whose true classes are ``labels`` (n,), negative if unknown.

        The columns are label and score (name and probability of the likeliest class), label_2, score_2 and so on, truth
        and answer (the classes as numbers) and loss (cross entropy). If an image may have several classes, they are
        truth and probabilities, a list with a number for each class.
        """
        import torch
        from torch.nn.functional import cross_entropy

        batches = [images[start : start + _BATCH_SIZE] for start in range(0, len(images), _BATCH_SIZE)]
        logits = torch.cat([self._logits(batch) for batch in batches])  # (n, num_classes)
        probabilities = self._classifier.probabilities_of(logits).numpy()
        if self._classifier.thresholds is not None:
            lists = pa.FixedSizeListArray.from_arrays(number_array(probabilities.ravel()), probabilities.shape[1])
            return pa.table({"truth": number_array(labels), "probabilities": lists})
        likeliest = np.argsort(-probabilities, axis=1, kind="stable")[:, : self._top_k]  # (n, top_k)
        every = np.arange(len(images))
        names = string_array(self._classifier.classes)
        columns: dict[str, Any] = {}
        for rank in range(self._top_k):
            suffix = f"_{rank + 1}" if rank else ""
            chosen = likeliest[:, rank]
            columns[f"label{suffix}"] = names.take(number_array(chosen))
            columns[f"score{suffix}"] = number_array(probabilities[every, chosen].astype(np.float32))
        loss = cross_entropy(logits, torch.from_numpy(labels.clip(min=0)), reduction="none").numpy()
        about = {"truth": labels, "answer": likeliest[:, 0], "loss": loss}
        return pa.table({**columns, **{name: number_array(values) for name, values in about.items()}})

    def _logits(self, images: Pixels) -> torch.Tensor:
        """Logits, float64 (n, num_classes), on the CPU."""
        import torch

        from raytrain.training.autocast import mixed_precision

        with torch.no_grad(), mixed_precision(self._precision, self._device):
            return self._classifier(torch.from_numpy(images.copy()).to(self._device)).double().cpu()


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
        as_measured: bool = False,
    ) -> pa.Table:
        """Predict the manifest's images, which are in the store ``images``: a row for each, in the manifest's order.

        The cluster at ``address`` does it, or one that a command here would join; without any, this process does. The
        columns are those of :func:`raytrain.launch.predict_request.predict_here`; for ``as_measured`` see Predictor.
        """
        views = replace(self.config, test_views=test_views).test_views  # checked
        options: dict[str, Any] = {"top_k": top_k, "test_views": views, "as_measured": as_measured}
        load_predictor = partial(Predictor, run=self.name, trust=self.trust, **options)
        request = PredictRequest(images, manifest, evaluation_format(self.config), self.store, load_predictor)
        if uses_cluster(address):
            return self._predict_on_cluster(request, workers, address)
        found = machine_hardware()
        return pa.concat_tables(predict_here(request, self.placement(workers or max(1, int(found.gpus)), found)))

    def _predict_on_cluster(self, request: PredictRequest, workers: int | None, address: str | None) -> pa.Table:
        with Connection(address) as cluster:
            cluster.connect()
            from raytrain.launch.ray.predict_images import predict_images  # imports Ray

            placement = self.placement(workers or "auto", cluster_hardware())
            return pa.concat_tables(predict_images(request, placement, scope_keys=self.config.scope_keys))

    def placement(self, workers: int | str, found: Hardware) -> Placement:
        """Where ``workers`` networks run on the hardware."""
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
