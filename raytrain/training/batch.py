"""What a loop computes on: a worker's share of a global batch on its device, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain.data.local_batch import LocalBatch
from raytrain.training.augment import Augment


@dataclass(frozen=True)
class Batch:
    """This worker's share of a global batch, ready for the network.

    A worker that has nothing in it gets one black image as a stand-in, and ``num_used`` is 0: ``Run.backward`` and ``Run.log``
    make it count for nothing.
    """

    images: Tensor  # (m, C, H, W), normalised and, for training, augmented; float32 (or float64)
    labels: Tensor  # (m,), int64
    samples: Tensor  # (m,), int64: indices into the manifest
    step: int  # counted from 0
    epoch: int  # counted from 0
    num_used: int  # m, or 0 where the images are a stand-in
    part_sizes: tuple[int, ...]  # how many of the m are in each part that the global batch is computed in

    def parts(self) -> Iterator[Batch]:
        """The parts that the global batch is computed in, one after the other; a stand-in where this worker has nothing."""
        start = 0
        for size in self.part_sizes:
            rows = slice(start, start + size) if size else slice(0, 1)
            images, labels, samples = self.images[rows], self.labels[rows], self.samples[rows]
            yield replace(self, images=images, labels=labels, samples=samples, num_used=size, part_sizes=(size,))
            start += size


def to_batch(share: LocalBatch, augment: Augment, device: torch.device, *, training: bool) -> Batch:
    """Move a share to the device, where it goes as uint8 and becomes what the network sees."""
    arrays = (share.images, share.labels, share.samples) if len(share.labels) else _stand_in(augment)
    images, labels, samples = (_to_device(array, device) for array in arrays)
    batch = share.batch
    ready = augment.train(images, samples, batch.epoch) if training else augment.evaluate(images)
    return Batch(ready, labels, samples, batch.step, batch.epoch, len(share.labels), share.part_sizes)


def _stand_in(augment: Augment) -> tuple[np.ndarray[Any, Any], ...]:
    return np.zeros((1, *augment.source_shape), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)


def _to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
