"""The network of a run as it predicts blocks of images, on a GPU if there is one, as rows of a table."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.config.evaluation import TestView
from raytrain.data.blocks import number_array, string_array
from raytrain.data.images.crop_box import Pixels
from raytrain.storage.store import Store
from raytrain.training.networks.device_precision import set_gpu_products

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
        from raytrain.training.networks.mixed_precision import prepare_for_autocast

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

        from raytrain.training.networks.mixed_precision import mixed_precision

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
