"""The batch that a loop computes on: a worker's local batch on its device, as a whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain.data.local_batch import LocalBatch
from raytrain.training.augment import Augment


@dataclass(frozen=True)
class Batch:
    """This worker's slice of a global batch, ready for the network.

    A worker whose slice is empty gets one black image as a placeholder, and ``num_used`` is 0: ``Run.backward`` and
    ``Run.log`` count it as nothing.
    """

    images: Tensor  # (m, C, H, W), normalised and, for training, augmented; float32 (or float64)
    labels: Tensor  # (m,), int64; if an image may have several classes, the number of its set of classes
    targets: (
        Tensor  # what to predict: the labels, or the classes' probabilities (m, C): mixed ones, or 0 and 1 of a set
    )
    samples: Tensor  # (m,), int64: indices into the manifest
    step: int  # counted from 0
    epoch: int  # counted from 0
    num_used: int  # m, or 0 for a placeholder
    part_sizes: tuple[int, ...]  # number of the m images in each part of the global batch

    def parts(self) -> Iterator[Batch]:
        """This worker's slice of each part of the global batch, in order; a placeholder if a slice is empty."""
        start = 0
        for size in self.part_sizes:
            rows = slice(start, start + size) if size else slice(0, 1)
            tensors = {name: getattr(self, name)[rows] for name in ("images", "labels", "targets", "samples")}
            yield replace(self, **tensors, num_used=size, part_sizes=(size,))
            start += size


def to_batch(
    local: LocalBatch, augment: Augment, device: torch.device, *, training: bool, label_sets: Tensor | None = None
) -> Batch:
    """Move a local batch to the device as uint8, and augment (if ``training``) and normalise it there.

    ``label_sets``, (K, C) of 0 and 1, says which classes belong to each label; None if a label is a class.
    """
    arrays = (local.images, local.labels, local.samples) if len(local.labels) else _placeholder(augment)
    images, labels, samples = _to_device(arrays, device)
    step, epoch = local.batch.step, local.batch.epoch
    draws = local.draws if len(local.draws) else arrays[2]
    images = augment.train(images, draws, epoch) if training else augment.evaluate(images)
    targets = labels if label_sets is None else label_sets[labels].to(images.dtype)
    return Batch(images, labels, targets, samples, step, epoch, len(local.labels), local.part_sizes)


def _placeholder(augment: Augment) -> tuple[np.ndarray[Any, Any], ...]:
    return np.zeros((1, *augment.source_shape), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)


def _to_device(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """Move arrays to the device. To a GPU they are copied beside what it still computes of the step before."""
    tensors = [torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in arrays]
    if device.type != "cuda":
        return tensors
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        copies = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copying)
    for copy in copies:
        copy.record_stream(computing)  # otherwise the next copy could be written over one that is still read
    return copies


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
