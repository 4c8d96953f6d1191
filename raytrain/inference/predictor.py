"""What predicting does in the cluster: tasks that read images, and actors that hold the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from raytrain.backends.ray.ingest import ImageSet, chosen, to_block, to_table
from raytrain.data.decode import ImageReader
from raytrain.storage.base import Store

_BATCH = 256


def read_block(row: Any, images: ImageSet) -> Any:
    """The images of one block with their keys and, where one could not be read, the reason."""
    start = int(row["id"][0]) * images.rows_per_block
    samples = np.arange(start, min(start + images.rows_per_block, images.num_images), dtype=np.int64)
    wanted = chosen(images, samples)
    labels = wanted.labels.astype(np.int64)
    pixels, bad = ImageReader(images.store, images.shape).read(wanted)
    errors = pa.array([bad.get(place) for place in range(len(wanted))], pa.string())
    return to_table(pixels, labels, samples).append_column("key", wanted.keys.cast(pa.string())).append_column("error", errors)


class Predictor:
    """The network in an actor of its own: it answers block after block."""

    def __init__(self, run_store: Store, run: str, top_k: int, threads: int) -> None:
        import torch

        from raytrain.inference.classifier import load_from

        torch.set_num_threads(threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._classifier = load_from(run_store, run).to(self._device)
        self._top_k = top_k

    def __call__(self, table: pa.Table) -> pa.Table:
        """Columns key, label, score, error, the true and the answered class as numbers, the cross entropy, and the other k."""
        block = to_block(table, self._classifier.shape)
        scores = np.concatenate([self._scores(block.images[i : i + _BATCH]) for i in range(0, len(block), _BATCH)])
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self._top_k]
        unread = table["error"].is_valid().to_numpy()
        columns = {"key": table["key"]}
        for place in range(self._top_k):
            suffix = f"_{place + 1}" if place else ""
            chosen = order[:, place]
            names = np.array(self._classifier.classes, dtype=object)[chosen]
            columns[f"label{suffix}"] = pa.array(names, pa.string(), mask=unread)
            columns[f"score{suffix}"] = pa.array(scores[np.arange(len(scores)), chosen], pa.float32(), mask=unread)
        truth = block.labels.clip(min=0)
        loss = -np.log(np.maximum(scores[np.arange(len(scores)), truth], 1e-30))
        return pa.table({**columns, "error": table["error"], "truth": block.labels, "answer": order[:, 0], "loss": loss})

    def _scores(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Probabilities (n, num_classes), float64."""
        import torch

        with torch.no_grad():
            logits = self._classifier(torch.from_numpy(images.copy()).to(self._device))
            return logits.double().softmax(dim=1).cpu().numpy()
