"""The network of a run as it predicts blocks of images, on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.config.evaluation import TestView
from raytrain.data.blocks import number_array, string_array
from raytrain.data.images.decode import Pixels
from raytrain.storage.store import Store

_BATCH_SIZE = 256
_MIN_PROBABILITY = 1e-30


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
    ) -> None:
        """Load the best checkpoint of the run called ``run`` from its ``store``; for ``trust`` see raytrain.load.

        Logits are averaged over ``test_views`` of each image, and over those that the run was trained with.
        """
        import torch

        from raytrain.inference.classifier import load_classifier

        torch.set_num_threads(num_threads)
        self._device = f"cuda:{gpu}" if torch.cuda.is_available() else "cpu"
        self._classifier = load_classifier(store, run, trust=trust).to(self._device)
        self._classifier.test_views |= set(test_views)
        self._top_k = top_k

    def __call__(self, images: Pixels, labels: npt.NDArray[np.int64]) -> pa.Table:
        """Predict ``images``, uint8 (n, H, W, C), whose true classes are ``labels`` (n,), negative if unknown.

        The columns are label and score (name and probability of the likeliest class), label_2, score_2 and so on, truth
        and answer (the classes as numbers) and loss (cross entropy). If an image may have several classes, they are
        truth and probabilities, a list with a number for each class.
        """
        batches = [images[start : start + _BATCH_SIZE] for start in range(0, len(images), _BATCH_SIZE)]
        probabilities = np.concatenate([self._probabilities(batch) for batch in batches])  # (n, num_classes)
        if self._classifier.thresholds is not None:
            lists = pa.FixedSizeListArray.from_arrays(number_array(probabilities.ravel()), probabilities.shape[1])
            return pa.table({"truth": number_array(labels), "probabilities": lists})
        likeliest = np.argsort(-probabilities, axis=1, kind="stable")[:, : self._top_k]  # (n, top_k)
        rows = np.arange(len(images))
        names = string_array(self._classifier.classes)
        columns: dict[str, Any] = {}
        for rank in range(self._top_k):
            suffix = f"_{rank + 1}" if rank else ""
            chosen = likeliest[:, rank]
            columns[f"label{suffix}"] = names.take(number_array(chosen))
            columns[f"score{suffix}"] = number_array(probabilities[rows, chosen].astype(np.float32))
        loss = -np.log(np.maximum(probabilities[rows, labels.clip(min=0)], _MIN_PROBABILITY))
        about = {"truth": labels, "answer": likeliest[:, 0], "loss": loss}
        return pa.table({**columns, **{name: number_array(values) for name, values in about.items()}})

    def _probabilities(self, images: Pixels) -> npt.NDArray[np.float64]:
        """Probabilities (n, num_classes)."""
        import torch

        return self._classifier.probabilities(torch.from_numpy(images.copy()).to(self._device)).cpu().numpy()
