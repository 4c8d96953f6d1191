"""A worker's batches on its device: read ahead, augmented and mixed there, for a run and for any other loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch, Prefetch
from raytrain.data.labels.part_names import Part
from raytrain.training.augment import Augment
from raytrain.training.batch import Batch, HostTensors, on_host, to_batch
from raytrain.training.device_decoder import DeviceDecoder
from raytrain.training.mixup import mix_batch
from raytrain.training.protocols import BatchSource, DecodeReporter


class DeviceBatches:
    """Makes the local batches of a ``source`` ready for the network, on ``device``.

    Args:
        label_sets: (K, C), bool, on ``device``: the classes of each label; None if a label is a class.
        reporter: takes what is found out about images that this worker decodes, as ``--decoder gpu`` asks for.

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
        """Read the training images from ``first_step`` on, and bring them to memory that the device can copy from.

        Or have the device decode them. A thread does so while the loop computes, ``--prefetch`` batches ahead.
        """
        ready = partial(on_host, augment=self._augment, device=self._device)
        batches = self.source.train(first_step)
        if self.decoder is not None:
            batches = map(self.decoder, batches)
        read = ((local, ready(local)) for local in batches)
        return Prefetch(read, self._config.prefetch)

    def prepare(self, local: LocalBatch, tensors: HostTensors) -> Batch:
        """Return a batch of :meth:`read_ahead` on the device, augmented, normalised and mixed.

        With mixup or CutMix, every worker calls this: images are mixed over all of them.
        """
        sets, config = self._label_sets, self._config
        batch = to_batch(local, self._augment, self._device, training=True, label_sets=sets, tensors=tensors)
        if config.mixup or config.cutmix:
            mixup, cutmix = config.mixup, config.cutmix
            batch = mix_batch(batch, self._num_classes, config.seed, mixup=mixup, cutmix=cutmix, label_sets=sets)
        return batch

    def close(self) -> None:
        """End the processes that decode beside the device, if there are any."""
        if self.decoder is not None:
            self.decoder.close()

    def held_out(self, part: Part) -> Iterator[Batch]:
        """Yield this worker's slice of the validation or the test images, resized and normalised."""
        for local in self.source.held_out(part):
            if len(local.labels):
                yield to_batch(local, self._augment, self._device, training=False, label_sets=self._label_sets)
