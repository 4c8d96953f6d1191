"""Sums the margin and the loss of each training image over the epochs, by which wrong labels are found.

The *margin* of an image in a step is the logit of its label minus the largest logit of any other class. A network
learns images with right labels from similar images, so their margins grow early. An image with a wrong label resembles
images with another label, so its margin stays low, and often negative, until the network has memorised it. So the mean
of the margin over all epochs, the *area under the margin* (Pleiss et al. 2020), ranks the images by how wrong their
labels look. It tells wrong labels apart from hard images.

Nothing is computed twice: the logits are those that the loop gives to ``run.loss``, ``run.accuracy`` or ``run.show``.
They are assigned to images by the labels that come with them, if these share their memory with the labels of the batch
or a slice of them. Each draw of an image counts once, at the first of the three calls. Later logits in the step, and
those of an evaluation, are ignored.

A worker keeps the sums of its own draws on its device, 16 bytes for each image of the data set: 19 MB for 1.2 million.
They are added up over the workers for each checkpoint, which holds them, and for each evaluation, after which worker 0
reports the images with the lowest mean margin. No step waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.config import TrainConfig
from raytrain.errors import flag
from raytrain.runs.metric_row import SuspiciousLabel
from raytrain.training.batches.batch import Batch
from raytrain.training.protocols import Worker

MARGINS = "margins"
"""Name of the sums in a checkpoint."""

_MOST_SAMPLES = 10_000_000  # whose sums take 160 MB of the device


class SampleMargins:
    """Sums for each of ``num_samples`` training images over this worker's draws of it.

    Example::

        margins = SampleMargins(len(manifest), num_classes=10, worker=Worker.here(device))
        margins.begin(batch)
        margins.add(model(batch.images), batch.labels)
        margins.lowest(16)
    """

    def __init__(self, num_samples: int, num_classes: int, worker: Worker) -> None:
        self._num_classes = num_classes
        self._worker = worker
        # Number of draws, sum of the margins, sum of the losses, (3, N).
        self._sums = torch.zeros(3, num_samples, device=worker.device)
        # For the latest draw, its epoch and the likeliest class except the label, as epoch * C + class, (N,); -1: none.
        self._rivals = torch.full((num_samples,), -1, dtype=torch.int32, device=worker.device)
        self._batch: Batch | None = None
        self._is_counted = np.zeros(0, bool)  # for each draw of the batch, (m,)

    @classmethod
    def of(cls, config: TrainConfig, num_samples: int, num_classes: int, worker: Worker) -> SampleMargins:
        """Return the sums of a run with these options.

        They are for 0 images, so that nothing is counted, if the images have no margins, or if they or the epochs are
        too many.
        """
        has_margins = not (margins_missing(config) or config.is_range_test)
        fits = num_samples <= _MOST_SAMPLES and config.epochs * num_classes < 2**31
        return cls(num_samples if has_margins and fits else 0, num_classes, worker)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue with the sums in the ``state`` of a checkpoint, if it has any that fit.

        Only worker 0 does: they are the sums of all workers, and would count once for each of them.
        """
        tensors = {"sums": self._sums, "rivals": self._rivals}
        fits = all(name in state and state[name].shape == tensor.shape for name, tensor in tensors.items())
        if self._worker.rank == 0 and fits:
            for name, tensor in tensors.items():
                tensor.copy_(state[name])

    def begin(self, batch: Batch) -> None:
        """Assign logits from now on to the images of ``batch``; to none, if it has none or nothing is counted."""
        self._batch = batch if batch.num_used and len(self._rivals) else None
        self._is_counted = np.zeros(batch.num_used, bool)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count the draws to which ``logits``, (m, C), and ``labels``, (m,), belong, unless they are counted already.

        Nothing is counted if the labels are not those of the batch or a slice of them. If probabilities, (m, C), come
        in place of labels, the loop has mixed the images, so this batch will not be counted any more.
        """
        if self._batch is None or not (_is_plain(logits) and _is_plain(labels)):
            return
        if labels.ndim > 1:
            self._is_counted[:] = True
        if (rows := _rows_of(labels, self._batch.labels)) is None:
            return
        if self._is_counted[rows].any():
            return
        self._is_counted[rows] = True

        # Add the margin and the cross entropy of each image. Values that overflow in float16 count as 0.
        # Logarithms of probabilities have the margins of the logits, and logsumexp would be nine kernels on a GPU.
        scores = logits.detach()[:, : self._num_classes].float().log_softmax(dim=1)
        index = labels[:, None]
        of_label = scores.gather(1, index)[:, 0]
        of_rival, rival = scores.scatter(1, index, -torch.inf).max(dim=1)
        values = torch.stack([torch.ones_like(of_label), of_label - of_rival, -of_label])  # (3, m)
        samples = self._batch.samples[rows]
        self._sums.index_add_(1, samples, values.nan_to_num(0.0, 0.0, 0.0))
        self._rivals[samples] = (self._batch.epoch * self._num_classes + rival).to(torch.int32)

    def joined_state(self) -> dict[str, Tensor]:
        """Return the sums of all workers' draws for a checkpoint; nothing if none was counted. Every worker calls this.

        The host waits for the device.
        """
        state = self._joined()
        return state if (state["rivals"] >= 0).any() else {}

    def _joined(self) -> dict[str, Tensor]:
        """Return the sums of all workers' draws, and the rivals of the latest draws. Every worker calls this."""
        sums, rivals = self._sums, self._rivals
        if self._worker.world_size > 1 and len(rivals):
            sums, rivals = sums.clone(), rivals.clone()
            dist.all_reduce(sums)
            dist.all_reduce(rivals, dist.ReduceOp.MAX)  # of the latest epoch, which is the larger number
        return {"sums": sums, "rivals": rivals}

    def lowest(self, most: int) -> tuple[SuspiciousLabel, ...]:
        """Return up to ``most`` images with the lowest mean margin, the lowest first. Every worker calls this.

        Images that were not drawn are left out.
        """
        state = self._joined()
        draws, margins, losses = state["sums"]
        means = torch.where(draws > 0, margins / draws, torch.inf)
        lowest = means.topk(min(most, len(means)), largest=False).indices
        columns = [lowest, draws[lowest], means[lowest], losses[lowest] / draws[lowest], state["rivals"][lowest]]
        rows = torch.stack([column.double() for column in columns]).T.tolist()  # one copy to the host
        return tuple(
            SuspiciousLabel(int(sample), int(count), margin, loss, int(rival) % self._num_classes)
            for sample, count, margin, loss, rival in rows
            if count
        )


def margins_missing(config: TrainConfig) -> str | None:
    """Return why the images of a run have no margins, as a part of a sentence; None if they have."""
    for name in ("mixup", "cutmix"):
        if getattr(config, name):
            return f"{flag(name)} mixes the images, and a mixed one has no margin"
    return "an image may have several classes" if config.multi_label else None


def _rows_of(labels: Tensor, of_batch: Tensor) -> slice | None:
    """Return which slice of a batch's labels, ``of_batch``, the tensor ``labels`` is a view of; None if it is none."""
    if labels is of_batch:
        return slice(0, len(labels))
    if labels.ndim != 1 or labels.dtype != of_batch.dtype or labels.stride() != (1,):
        return None
    if labels.untyped_storage().data_ptr() != of_batch.untyped_storage().data_ptr():
        return None
    first = labels.storage_offset() - of_batch.storage_offset()
    return slice(first, first + len(labels)) if 0 <= first <= len(of_batch) - len(labels) else None


def _is_plain(tensor: Any) -> bool:
    """Return whether ``tensor`` is a plain one with values, which it lacks while torch.compile or torch.func traces."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore
    return type(tensor) is Tensor and not is_wrapped and not torch.compiler.is_compiling()
