"""A worker's batches on its device: read ahead, augmented and mixed there, for a run and for any other loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch
from raytrain.data.labels.part_names import Part
from raytrain.data.prefetch import Prefetch
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import Batch
from raytrain.training.batches.device_decoder import DeviceDecoder
from raytrain.training.batches.mixup import mix_batch
from raytrain.training.protocols import BatchSource, DecodeReporter

_copy_stream = cache(torch.cuda.Stream)  # by GPU: one stream for each, on which images are copied to it
HostTensors = Sequence[Tensor]
"""Images, uint8 (m, H, W, C), labels and samples, int64 (m,), of a local batch on the host; a placeholder has m = 1.

Images that a GPU has decoded are on that GPU.
"""


class DeviceBatches:
    """Makes the local batches of a ``source`` ready for the network, on ``device``.

    Args:
        label_sets: (K, C), bool, on ``device``: the classes of each label; None if a label is a class.
        reporter: gets reports about images that this worker decodes itself, with ``--decoder gpu``.

    Example::

        batches = DeviceBatches(config, source, augment, device, num_classes=10)
        for local, tensors in batches.read_ahead(first_step=0):
            batch = batches.prepare(local, tensors)
    """

    def __init__(
        self,
        config: ResolvedConfig,
        source: BatchSource,
        augment: Augment,
        device: torch.device,
        num_classes: int,
        label_sets: Tensor | None = None,
        reporter: DecodeReporter | None = None,
    ) -> None:
        self.source = source
        self.decoder: DeviceDecoder | None = None
        if config.decoder == "gpu":
            assert reporter is not None
            self.decoder = DeviceDecoder(config, source, device, reporter)
        self._config, self._augment, self._device = config, augment, device
        self._num_classes, self._label_sets = num_classes, label_sets

    def read_ahead(self, first_step: int) -> Prefetch[tuple[LocalBatch, HostTensors]]:
        """Read the training images from ``first_step`` on, in a thread, ``--prefetch`` batches ahead of the loop.

        They are in memory from which the device can copy them, or, if it has decoded them, on the device.
        """
        augment, device = self._augment, self._device
        batches = self.source.train(first_step)
        if self.decoder is not None:
            batches = map(self.decoder, batches)
        with_tensors = ((local, on_host(local, augment, device)) for local in batches)
        return Prefetch(with_tensors, self._config.prefetch)

    def prepare(self, local: LocalBatch, tensors: HostTensors) -> Batch:
        """Return a batch of :meth:`read_ahead` on the device, augmented, normalised and mixed.

        With mixup or CutMix, every worker must call this, because images are mixed across workers.
        """
        sets, config = self._label_sets, self._config
        batch = to_batch(local, self._augment, self._device, training=True, label_sets=sets, tensors=tensors)
        if config.mixup or config.cutmix:
            mixup, cutmix = config.mixup, config.cutmix
            batch = mix_batch(batch, self._num_classes, config.seed, mixup=mixup, cutmix=cutmix, label_sets=sets)
        return batch

    def keys(self, batch: Batch) -> list[str]:
        """Return the keys of the images of a batch of this source; "" for a placeholder."""
        return self.source.keys(batch.part, batch.samples.tolist()) if batch.num_used else [""]

    def close(self) -> None:
        """End the processes that decode on the CPU for the device, if there are any."""
        if self.decoder is not None:
            self.decoder.close()

    def held_out(self, part: Part) -> Iterator[Batch]:
        """Yield this worker's slice of the validation or the test images, resized and normalised."""
        for local in self.source.held_out(part):
            if len(local.labels):
                batch = to_batch(local, self._augment, self._device, training=False, label_sets=self._label_sets)
                yield replace(batch, part=part)


def on_host(local: LocalBatch, augment: Augment, device: torch.device) -> HostTensors:
    """Return images, labels and samples of a local batch, in memory from which ``device`` can copy while it computes.

    For a GPU, they are copied to pinned memory, which takes long, so that the thread that reads ahead should call this.
    Images that the device has decoded stay there. A batch without images becomes a placeholder.
    """
    arrays = (local.images, local.labels, local.samples) if len(local.labels) else _placeholder(augment)
    tensors = [
        array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
        for array in arrays
    ]
    if device.type != "cuda":
        return tensors
    with torch.cuda.device(device):  # the current device of a new thread would be the first GPU
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
    """Return a local batch on the device: its images moved as uint8, augmented (if ``training``), and normalised.

    ``label_sets``, (K, C) of 0 and 1, has the classes of each label; None if a label is a class. ``tensors`` is the
    result of :func:`on_host`, if it was called before.
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
    """Return images, labels and samples of a placeholder: one black image of class 0, in place of an empty slice."""
    return np.zeros((1, *augment.source_shape), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)


def _to_device(tensors: HostTensors, device: torch.device) -> HostTensors:
    """Return tensors on the device; to a GPU, they are copied while it still computes the step before."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copying)  # the GPU waits, not the host
    for copy in copies:
        copy.record_stream(computing)  # otherwise the next copy could get this memory while it is still read
    return copies
