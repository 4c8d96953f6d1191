"""A local batch on the device, whole and in parts; mixup and CutMix over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.data.blocks import LocalBatch
from raytrain.data.plan.permutation import mix
from raytrain.training.augment import Augment


@dataclass(frozen=True)
class Batch:
    """This worker's slice of a global batch, ready for the network.

    A worker whose slice is empty gets one black image as a placeholder, and ``num_used`` is 0: its gradients and what
    it logs count as nothing.
    """

    images: Tensor  # (m, C, H, W), normalised and, for training, augmented; float32 (or float64)
    labels: Tensor  # (m,), int64; if an image may have several classes, the number of its set of classes
    targets: Tensor  # the labels, or the classes' probabilities (m, C): mixed ones, or 0 and 1 of a set
    samples: Tensor  # (m,), int64: indices into the manifest
    step: int  # counted from 0
    epoch: int  # counted from 0
    num_used: int  # m, or 0 for a placeholder
    part_sizes: tuple[int, ...]  # number of the m images in each part of the global batch
    is_last: bool = True  # of the microbatches; a whole batch is one
    begin_part: Callable[..., None] | None = field(default=None, repr=False, compare=False)  # the run's

    def microbatches(self) -> Iterator[Batch]:
        """Yield this worker's slice of each part of the global batch that ``--accumulate`` asks for, in order.

        Compute the mean loss of each, as of a whole batch, and call its ``backward()``: the gradients add up to that of
        the mean over the global batch. Batch norm treats each part as a batch. A slice may be a placeholder. With
        ``run.no_sync(not part.is_last)`` around a backward, the gradients travel between the workers once, not P times.
        """
        if len(self.part_sizes) == 1:
            yield self
            return
        start = 0
        for number, size in enumerate(self.part_sizes, start=1):
            rows = slice(start, start + size) if size else slice(0, 1)
            tensors = {name: getattr(self, name)[rows] for name in ("images", "labels", "targets", "samples")}
            is_last = number == len(self.part_sizes)
            part = replace(self, **tensors, num_used=size, part_sizes=(size,), is_last=is_last)
            if self.begin_part is not None:
                self.begin_part(part, is_whole=False)
            yield part
            start += size


HostTensors = Sequence[Tensor]
"""Images, uint8 (m, H, W, C), labels and samples, int64 (m,), of a local batch on the host; a placeholder has m = 1."""


def on_host(local: LocalBatch, augment: Augment, device: torch.device) -> HostTensors:
    """The tensors of a local batch, in memory from which ``device`` can copy while it computes.

    For a GPU this copies them, which takes so long that the thread that reads ahead had better do it.
    """
    arrays = (local.images, local.labels, local.samples) if len(local.labels) else _placeholder(augment)
    tensors = [torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in arrays]
    if device.type != "cuda":
        return tensors
    with torch.cuda.device(device):  # in a thread that knows of no device, the first one would be used
        return [tensor.pin_memory() for tensor in tensors]


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
    return Batch(images, labels, targets, samples, step, epoch, len(local.labels), local.part_sizes)


def _placeholder(augment: Augment) -> tuple[np.ndarray[Any, Any], ...]:
    return np.zeros((1, *augment.source_shape), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)


def _to_device(tensors: HostTensors, device: torch.device) -> HostTensors:
    """Move tensors to the device. To a GPU they are copied beside what it still computes of the step before."""
    if device.type != "cuda":
        return tensors
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


_KEY = 3  # keeps these random numbers apart from those of augmentation


def mix_batch(
    batch: Batch,
    num_classes: int,
    seed: int,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_sets: Tensor | None = None,
) -> Batch:
    """Mix each image with the one before it in the plan's global batch, and its target likewise.

    Which worker has that image doesn't matter: each sends its last ones to the others, so that every worker calls this.
    The first image is mixed with the last. Images that cannot be read are left out. The random numbers depend on
    ``seed`` and the step alone. An image's own share is at least half, so that ``labels`` stay the likelier classes.

    Args:
        mixup: the weight of an image is drawn from Beta(mixup, mixup) (Zhang et al. 2018); 0: no mixup.
        cutmix: a box of the other image is pasted, whose area is drawn from Beta(cutmix, cutmix) (Yun et al. 2019); 0:
            no CutMix. With both, each step draws which.
        label_sets: see :func:`to_batch`.
    """
    random = np.random.default_rng(mix(seed, batch.step, _KEY))
    cuts = cutmix > 0 and (mixup <= 0 or random.random() < 0.5)
    alpha = cutmix if cuts else mixup
    drawn = random.beta(alpha, alpha)
    own = max(drawn, 1 - drawn)
    images_before, labels_before = _before(batch)
    classes_of = torch.eye(num_classes, device=batch.labels.device) if label_sets is None else label_sets
    targets, others = (classes_of[labels].to(batch.images.dtype) for labels in (batch.labels, labels_before))
    if cuts:
        images, own = _paste(batch.images, images_before, own, random)
    else:
        images = images_before.lerp(batch.images, own)
    return replace(batch, images=images, targets=others.lerp(targets, own))


def _paste(images: Tensor, others: Tensor, own: float, random: np.random.Generator) -> tuple[Tensor, float]:
    """Paste a box of about 1 - ``own`` of the area; returns also the area that was left."""
    height, width = images.shape[2:]
    rows, columns = (_interval(side, (1 - own) ** 0.5, random) for side in (height, width))
    pasted = images.clone()
    pasted[:, :, rows, columns] = others[:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return pasted, 1 - area / (height * width)


def _interval(side: int, fraction: float, random: np.random.Generator) -> slice:
    """Pixels around a random centre, cut off at the edges."""
    centre, reach = random.random() * side, fraction * side / 2
    return slice(max(round(centre - reach), 0), min(round(centre + reach), side))


def _before(batch: Batch) -> tuple[Tensor, Tensor]:
    """The image before each image of the slice and its label, in the order of the global batch, which is cyclic."""
    images, labels = batch.images.roll(1, 0), batch.labels.roll(1, 0)
    if dist.is_initialized() and dist.get_world_size() > 1:
        last_images, last_labels = _last_of_slices(batch)
        start = 0
        for part, size in enumerate(batch.part_sizes):
            if size:
                images[start], labels[start] = last_images[part], last_labels[part]
            start += size
    return images, labels


def _last_of_slices(batch: Batch) -> tuple[Tensor, Tensor]:
    """For each part of the batch, the last image before this worker's slice of it, and its label."""
    num_parts, world_size = len(batch.part_sizes), dist.get_world_size()
    sizes = torch.tensor(batch.part_sizes).to(batch.labels.device, non_blocking=True)
    ends = (sizes.cumsum(0) - 1).clamp(min=0)
    images = _gathered(batch.images[ends].contiguous())  # (N, P, C, H, W)
    labels, counts = _gathered(torch.stack([batch.labels[ends], sizes], dim=1)).unbind(dim=2)  # (N, P) each
    order = torch.arange(num_parts * world_size, device=counts.device)  # of the slices: part by part, rank by rank
    filled = torch.where(counts.T.flatten() > 0, order, -1).cummax(dim=0).values  # the last with images up to each
    filled = torch.where(filled < 0, filled[-1].clamp(min=0), filled)
    chosen = filled.roll(1)[dist.get_rank() :: world_size]  # (P,)
    rank, part = chosen % world_size, chosen // world_size
    return images[rank, part], labels[rank, part]


def _gathered(own: Tensor) -> Tensor:
    """The tensors of all workers, of the same shape as this worker's ``own``, stacked."""
    rows = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(rows, own)
    return rows.unflatten(0, (-1, len(own)))
