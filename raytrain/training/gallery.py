"""Gallery of a run: its last batch, its worst test images, and its confusions."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.images.decode import Pixels
from raytrain.errors import RaytrainError
from raytrain.monitor.events import DocumentLost, Event
from raytrain.runs.documents import EVALUATION, plain, write_json
from raytrain.storage.store import Store
from raytrain.training.batch import Batch

_NUM_IMAGES = 16
_MAX_SIDE = 96  # pixels
_MAX_CLASSES = 1000  # up to which confusions are counted, in a matrix of its square
_MAX_CONFUSIONS = 5000


class _Examples(NamedTuple):
    """Some images with the network's answers, on the device; the one with the largest loss first if they are sorted."""

    images: Tensor  # (k, C, H, W), as the network sees them
    labels: Tensor  # (k,), int64
    logits: Tensor  # (k, classes)
    samples: Tensor  # (k,), int64: indices into the manifest
    losses: Tensor  # (k,), float32

    @classmethod
    def of(cls, batch: Batch, logits: Tensor) -> _Examples:
        logits = logits.detach().float()
        losses = F.cross_entropy(logits, batch.labels, reduction="none").nan_to_num(torch.inf)
        return cls(batch.images, batch.labels, logits, batch.samples, losses)

    def take(self, places: Tensor | slice) -> _Examples:
        return _Examples(*(column[places] for column in self))

    def worst(self, other: _Examples | None = None) -> _Examples:
        """The worst of these and of the ``other`` ones."""
        both = _Examples(*map(torch.cat, zip(self, other, strict=True))) if other else self
        return both.take(both.losses.topk(min(_NUM_IMAGES, len(both.losses))).indices)


class Gallery:
    """Collects what a loop shows, a batch only by reference, and writes it in the background after evaluations."""

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
        """Remember the latest batch of the training. ``logits`` has the shape (m, classes)."""
        self._latest = (batch, logits.detach())

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Add a batch of an evaluation."""
        self._worst = _Examples.of(batch, logits).worst(self._worst)
        num_classes = len(self._classes)
        if num_classes <= _MAX_CLASSES:
            if self._confusions is None:
                self._confusions = torch.zeros(num_classes**2, dtype=torch.int64, device=logits.device)
            places = batch.labels * num_classes + logits.argmax(dim=1)
            self._confusions.index_add_(0, places, torch.ones_like(places))  # bincount would wait for the device

    def write(self, step: int, rank: int, world_size: int) -> None:
        """Put together what all workers, each of which calls this, added since the last time; worker 0 writes it."""
        mine = (self._confusion_cells(), [] if self._worst is None else self._described(self._worst))
        gathered: list[Any] = [mine] * world_size
        if world_size > 1:
            dist.all_gather_object(gathered, mine)
        self._worst = self._confusions = None
        if rank == 0 and any(worst for _, worst in gathered):
            worst = sorted((one for _, each in gathered for one in each), key=lambda one: -one["loss"])[:_NUM_IMAGES]
            cells = _added_up(cells for cells, _ in gathered)
            self._writer.submit(self._write, step, worst, self._last_batch(), cells)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _write(
        self, step: int, worst: list[dict[str, Any]], batch: list[dict[str, Any]], confusion: list[list[int]]
    ) -> None:
        for example in (*worst, *batch):
            example["image"] = _png(example["image"])
        document = {"step": step, "classes": self._classes, "worst": worst, "batch": batch, "confusion": confusion}
        try:
            write_json(self._store, EVALUATION, plain(document))
        except RaytrainError as error:
            self._report(DocumentLost(EVALUATION, str(error)))

    def _last_batch(self) -> list[dict[str, Any]]:
        if self._latest is None or not self._latest[0].num_used:
            return []
        return self._described(_Examples.of(*self._latest).take(slice(_NUM_IMAGES)))

    def _described(self, examples: _Examples) -> list[dict[str, Any]]:
        """The examples on the host: pixels as uint8 (H, W, C), and plain numbers."""
        examples = _Examples(*(column.cpu() for column in examples))  # on a GPU, each call that follows would wait
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

    def _confusion_cells(self) -> list[list[int]]:
        """Label, prediction and count of each cell that is not empty."""
        if self._confusions is None:
            return []
        counts, num_classes = self._confusions.cpu(), len(self._classes)
        places = counts.nonzero()[:, 0]
        return torch.stack([places // num_classes, places % num_classes, counts[places]], dim=1).tolist()


def screen_pixels(images: Tensor, config: ResolvedConfig, max_side: int) -> Pixels:
    """Normalised images, (k, C, H, W), as pixels for a screen: uint8 (k, H, W, C), with sides up to ``max_side``."""
    smaller = max_side / max(images.shape[2:])
    images = images.detach().float()
    if smaller < 1:
        images = F.interpolate(images, scale_factor=smaller, mode="area")
    mean, std = (images.new_tensor(values)[:, None, None] for values in (config.mean, config.std))
    return ((images * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def _added_up(lists: Any) -> list[list[int]]:
    """The cells of all workers, added up, those with the largest counts first."""
    counts: Counter[tuple[int, int]] = Counter()
    for label, prediction, count in (cell for cells in lists for cell in cells):
        counts[label, prediction] += count
    return [[*pair, count] for pair, count in counts.most_common(_MAX_CONFUSIONS)]


def _png(pixels: Any) -> str:
    """Pixels, uint8 (H, W, 1 or 3), as a PNG in a data URL."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
