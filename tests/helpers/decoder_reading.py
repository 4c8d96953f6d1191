"""A reader in processes, for tests of how they start and end."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future

import numpy as np

from raytrain.data.blocks import Block
from raytrain.data.images.decode import Pixels
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.launch.decoders import Decoders
from raytrain.runs.metric_row import SkippedImage

ROWS, ROW_BYTES = 3, 4
FAILS, FAILS_STRANGELY = 100, 200


class Recorder:
    def __init__(self) -> None:
        self.skipped: list[SkippedImage] = []
        self.retries = 0

    def skip(self, images: list[SkippedImage]) -> None:
        self.skipped += images

    def retried(self, num_requests: int) -> None:
        self.retries += num_requests


class Strange(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, text: str, lock: threading.Lock) -> None:
        super().__init__(text, lock)


class Reading:
    """Reads blocks whose pixels are the samples' numbers, and whose labels tell which process has read them."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.decoders = Decoders(self.recorder, ROWS * ROW_BYTES)

    def read(self, samples: Int64s, epoch: int, pixels: Pixels | None) -> Block:
        if samples[0] == FAILS:
            raise UsageError("no such image")
        if samples[0] == FAILS_STRANGELY:
            raise Strange("out of order", threading.Lock())
        assert pixels is not None
        images = pixels[: len(samples) * ROW_BYTES].reshape(len(samples), 2, 2, 1)
        images[:] = samples[:, None, None, None] + epoch
        self.decoders.report([SkippedImage("a.jpg", "it is empty")], num_retries=2)
        return Block(images, np.full(len(samples), os.getpid()), samples)


def block(reading: Reading, first: int, epoch: int = 0) -> Future[Block]:
    return reading.decoders.read(0, np.arange(first, first + ROWS), epoch)
