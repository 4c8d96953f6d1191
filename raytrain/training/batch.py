"""A local batch on the device, whole and in microbatches, and the batches of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain.data.blocks import LocalBatch
from raytrain.training import local_images
from raytrain.training.augment import Augment
from raytrain.training.local_images import LocalImages


@dataclass(frozen=True)
class Batch:
    """This worker's slice of a global batch, ready for the network: ``images, labels = batch``.

    A worker whose slice is empty gets one black image as a placeholder, and ``num_used`` is 0: its gradients and what
    it logs count as nothing.

    Example::

        for batch in epoch:
            loss = cross_entropy(model(batch.images), batch.labels)
    """

    images: Tensor  # (m, C, H, W), normalised and, for training, augmented; float32 (or float64)
    labels: Tensor  # (m,), int64; if an image may have several classes, the number of its set of classes
    targets: Tensor  # the labels, or the classes' probabilities (m, C): mixed ones, or 0 and 1 of a set
    samples: Tensor  # (m,), int64: indices into the manifest
    step: int  # counted from 0
    epoch: int  # counted from 0
    num_used: int  # m, or 0 for a placeholder
    microbatch_sizes: tuple[int, ...]  # number of the m images in each microbatch
    is_last: bool = True  # of the microbatches; a whole batch is one
    begin_microbatch: Callable[..., None] | None = field(default=None, repr=False, compare=False)  # the run's

    def __post_init__(self) -> None:
        local_images.remember(self.images, LocalImages(len(self.images), self.num_used, self.samples, self.step))

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the images and the labels, as a pair of torch's ``DataLoader``."""
        local_images.expect(self.images)
        return iter((self.images, self.labels))

    def to(self, *device: Any, **options: Any) -> Batch:
        """Return the batch with its tensors moved, as ``Tensor.to`` does: trainers of other libraries call this."""
        names = "images", "labels", "targets", "samples"
        return replace(self, **{name: getattr(self, name).to(*device, **options) for name in names})

    def microbatches(self) -> Iterator[Batch]:
        """Yield this worker's slice of each microbatch that ``--accumulate`` asks for, in order.

        Compute the mean loss of each, as of a whole batch, and call its ``backward()``: the gradients add up to that of
        the mean over the global batch. Batch norm treats each microbatch as a batch. A slice may be a placeholder.
        With ``run.no_sync(not microbatch.is_last)`` around a backward, the gradients travel between the workers once,
        not P times.
        """
        if len(self.microbatch_sizes) == 1:
            yield self
            return
        start = 0
        for number, size in enumerate(self.microbatch_sizes, start=1):
            rows = slice(start, start + size) if size else slice(0, 1)
            tensors = {name: getattr(self, name)[rows] for name in ("images", "labels", "targets", "samples")}
            is_last = number == len(self.microbatch_sizes)
            microbatch = replace(self, **tensors, num_used=size, microbatch_sizes=(size,), is_last=is_last)
            if self.begin_microbatch is not None:
                self.begin_microbatch(microbatch, is_whole=False)
            yield microbatch
            start += size


class Epoch:
    """Batches of one epoch; after a resume in the middle of it, those that are left.

    Example::

        for epoch in run.epochs():
            for batch in epoch:
                first_of_epoch = batch.step % len(epoch) == 0
    """

    def __init__(self, number: int, num_steps: int, batches: Iterator[Batch]) -> None:
        self.number = number
        """Counted from 0."""
        self._num_steps = num_steps
        self._batches = batches

    def __len__(self) -> int:
        """Number of batches in the whole epoch, also of those before a resume."""
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


HostTensors = Sequence[Tensor]
"""Images, uint8 (m, H, W, C), labels and samples, int64 (m,), of a local batch on the host; a placeholder has m = 1.

Images that a device has decoded are on the device.
"""


def on_host(local: LocalBatch, augment: Augment, device: torch.device) -> HostTensors:
    """Return the tensors of a local batch, in memory from which ``device`` can copy while it computes.

    For a GPU this copies them, which takes so long that the thread that reads ahead had better do it. Images that the
    device has decoded are there already.
    """
    arrays = (local.images, local.labels, local.samples) if len(local.labels) else _placeholder(augment)
    tensors = [
        array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
        for array in arrays
    ]
    if device.type != "cuda":
        return tensors
    with torch.cuda.device(device):  # in a thread that knows of no device, the first one would be used
        return [tensor if tensor.is_cuda else tensor.pin_memory() for tensor in tensors]


def to_batch(
    local: LocalBatch,
    augment: Augment,
    device: torch.device,
    *,
    training: bool,
    label_sets: Tensor | None = None,
    tensors: HostTensors | None = None,
) -> Batch:
    """Move a local batch to the device as uint8, and augment (if ``training``) and normalise it there.

    ``label_sets``, (K, C) of 0 and 1, says which classes belong to each label; None if a label is a class. ``tensors``
    are those of :func:`on_host`, if they have been made before.
    """
    images, labels, samples = _to_device(tensors or on_host(local, augment, device), device)
    step, epoch = local.batch.step, local.batch.epoch
    if training:
        draws = local.draws if len(local.draws) else _placeholder(augment)[2]
        images = augment.train(images, draws, epoch)
    else:
        images = augment.evaluate(images)
    targets = labels if label_sets is None else label_sets[labels].to(images.dtype)
    return Batch(images, labels, targets, samples, step, epoch, len(local.labels), local.microbatch_sizes)


def _placeholder(augment: Augment) -> tuple[np.ndarray[Any, Any], ...]:
    """Return images, labels and samples of the one black image that stands for an empty slice."""
    return np.zeros((1, *augment.source_shape), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)


def _to_device(tensors: HostTensors, device: torch.device) -> HostTensors:
    """Move tensors to the device. To a GPU they are copied beside what it still computes of the step before."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copying)
    for copy in copies:
        copy.record_stream(computing)  # otherwise the next copy could be written over one that is still read
    return copies


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
