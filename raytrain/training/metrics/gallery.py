"""Gallery of a run, for its page: the last batch, the worst validation images, and the most frequent confusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.png_url import png_url
from raytrain.errors import RaytrainError
from raytrain.monitor.events import DocumentLost, Event
from raytrain.runs.documents import EVALUATION, plain, write_json
from raytrain.storage.store import Store
from raytrain.training.batches.batch import Batch

_NUM_IMAGES = 16
_MAX_SIDE = 96  # pixels
_MAX_CLASSES = 1000  # with more classes, confusions are not counted: their matrix would be too large
_MAX_CONFUSIONS = 5000


class _Examples(NamedTuple):
    """Some images with the network's answers, on the device."""

    images: Tensor  # (k, C, H, W), as the network sees them
    labels: Tensor  # (k,), int64
    logits: Tensor  # (k, classes)
    samples: Tensor  # (k,), int64: indices into the manifest
    losses: Tensor  # (k,), float32

    @classmethod
    def of(cls, batch: Batch, logits: Tensor) -> _Examples:
        """Return all images of a ``batch``, for which the network has returned ``logits``.

        A loss of NaN counts as infinite, so that such an image is among the worst.
        """
        logits = logits.detach().float()
        losses = F.cross_entropy(logits, batch.labels, reduction="none").nan_to_num(torch.inf)
        return cls(batch.images, batch.labels, logits, batch.samples, losses)

    def worst(self, other: _Examples | None = None) -> _Examples:
        """Return the 16 images with the largest losses among these and the ``other`` ones, the largest first."""
        joined = _Examples(*map(torch.cat, zip(self, other, strict=True))) if other else self
        worst = joined.losses.topk(min(_NUM_IMAGES, len(joined.losses))).indices
        return _Examples(*(column[worst] for column in joined))


class Gallery:
    """Collects the batches that a loop shows, and writes the document of the gallery in the background.

    ``report`` gets an event if storage does not take the document.

    Example::

        gallery = Gallery(config, classes, store, reporter.note_event)
        gallery.add(batch, logits)  # for each batch of an evaluation
        gallery.write(step=100, rank=0, world_size=1)
        gallery.close()
    """

    def __init__(
        self, config: ResolvedConfig, classes: tuple[str, ...], store: Store, report: Callable[[Event], None]
    ) -> None:
        self._config = config
        self._classes = classes
        self._store = store
        self._report = report
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="gallery")
        self._latest: tuple[Batch, Tensor] | None = None
        self._worst: _Examples | None = None
        self._confusions: Tensor | None = None  # (classes²,), int64

    def remember(self, batch: Batch, logits: Tensor) -> None:
        """Remember the latest training batch, for which the network has returned ``logits``, (m, classes)."""
        self._latest = (batch, logits.detach())

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Count the confusions in a batch of an evaluation, and keep its worst images, until :meth:`write`.

        ``logits``, (m, classes), are what the network has returned for it.
        """
        self._worst = _Examples.of(batch, logits).worst(self._worst)
        num_classes = len(self._classes)
        if num_classes <= _MAX_CLASSES:
            if self._confusions is None:
                self._confusions = torch.zeros(num_classes**2, dtype=torch.int64, device=logits.device)
            cells = batch.labels * num_classes + logits.argmax(dim=1)
            self._confusions.index_add_(0, cells, torch.ones_like(cells))  # bincount would wait for the device

    def write(self, step: int, rank: int, world_size: int) -> None:
        """Join the images and confusions added since the last call; worker 0 writes them. Every worker calls this.

        Nothing is written if no worker has added an image. ``step`` is the number of completed steps.
        """
        # Gather this worker's worst images, and those cells of the matrix that are not 0: [label, prediction, count].
        cells: list[list[int]] = []
        if self._confusions is not None:
            counts, num_classes = self._confusions.cpu(), len(self._classes)
            filled = counts.nonzero()[:, 0]
            cells = torch.stack([filled // num_classes, filled % num_classes, counts[filled]], dim=1).tolist()
        collected = (cells, [] if self._worst is None else self._described(self._worst))
        collected_by_worker: list[Any] = [collected] * world_size
        if world_size > 1:
            dist.all_gather_object(collected_by_worker, collected)
        self._worst = self._confusions = None
        if rank > 0 or not any(images for _, images in collected_by_worker):
            return

        # Choose the worst images of all workers, and the most frequent confusions.
        worst = sorted(
            (image for _, images in collected_by_worker for image in images), key=lambda image: -image["loss"]
        )
        totals: Counter[tuple[int, int]] = Counter()
        for worker_cells, _ in collected_by_worker:
            for label, prediction, count in worker_cells:
                totals[label, prediction] += count
        confusion = [[*cell, count] for cell, count in totals.most_common(_MAX_CONFUSIONS)]

        # Add the first images of the latest training batch.
        latest: list[dict[str, Any]] = []
        if self._latest is not None and self._latest[0].num_used:
            latest = self._described(_Examples(*(column[:_NUM_IMAGES] for column in _Examples.of(*self._latest))))
        self._writer.submit(self._write_document, step, worst[:_NUM_IMAGES], latest, confusion)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _described(self, examples: _Examples) -> list[dict[str, Any]]:
        """Return a dictionary for each example, on the host: pixels as uint8 (H, W, C), and plain numbers."""
        examples = _Examples(*(column.cpu() for column in examples))  # so that the host waits for a GPU only here
        probabilities, predictions = examples.logits.softmax(dim=1).max(dim=1)
        columns = {
            "image": list(screen_pixels(examples.images, self._config, _MAX_SIDE)),
            "label": examples.labels.tolist(),
            "prediction": predictions.tolist(),
            "probability": probabilities.tolist(),
            "loss": examples.losses.tolist(),
            "sample": examples.samples.tolist(),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _write_document(
        self, step: int, worst: list[dict[str, Any]], batch: list[dict[str, Any]], confusion: list[list[int]]
    ) -> None:
        """Write the document of an evaluation, with images as PNGs in data URLs; report it if storage refuses it."""
        for example in (*worst, *batch):
            example["image"] = png_url(example["image"])
        document = {"step": step, "classes": self._classes, "worst": worst, "batch": batch, "confusion": confusion}
        try:
            write_json(self._store, EVALUATION, plain(document))
        except RaytrainError as error:
            self._report(DocumentLost(EVALUATION, str(error)))


def screen_pixels(images: Tensor, config: ResolvedConfig, max_side: int) -> Pixels:
    """Return normalised images, (k, C, H, W), as pixels for a screen: uint8 (k, H, W, C), no side over ``max_side``."""
    factor = max_side / max(images.shape[2:])
    images = images.detach().float()
    if factor < 1:
        size = [max(1, int(side * factor)) for side in images.shape[2:]]
        images = F.interpolate(images, size, mode="area")
    mean, std = (images.new_tensor(values)[:, None, None] for values in (config.mean, config.std))
    return ((images * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
