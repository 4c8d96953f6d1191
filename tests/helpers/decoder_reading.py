"""A reader in processes, for tests of how they start and end."""

from __future__ import annotations

import os
import resource
import signal
import threading
from concurrent.futures import Future

import numpy as np

from raytrain.data.blocks import Block
from raytrain.data.images.crop_box import Pixels
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.loader.decoder_processes import Decoders, Report, start_processes
from raytrain.runs.metric_row import SkippedImage

ROWS, ROW_BYTES = 3, 4
FAILS, FAILS_STRANGELY, DIES, COUNTS_PAGES = 100, 200, 300, 400


class Recorder:
    def __init__(self) -> None:
        self.skipped: list[SkippedImage] = []
        self.retries = 0

    def note_skipped(self, images: list[SkippedImage]) -> None:
        self.skipped += images

    def note_retries(self, num_requests: int) -> None:
        self.retries += num_requests


class Strange(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, text: str, lock: threading.Lock) -> None:
        super().__init__(text, lock)


class Reader:
    """Reads blocks whose pixels are the samples' numbers, and whose labels tell which process has read them."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def read(self, draws: Int64s, epoch: int, pixels: Pixels | None = None) -> Block:
        if draws[0] == FAILS:
            raise UsageError("no such image")
        if draws[0] == FAILS_STRANGELY:
            raise Strange("out of order", threading.Lock())
        if draws[0] == DIES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if draws[0] == COUNTS_PAGES:
            return Block(np.zeros((len(draws), 2, 2, 1), np.uint8), np.full(len(draws), _new_pages()), draws)
        assert pixels is not None
        images = pixels[: len(draws) * ROW_BYTES].reshape(len(draws), 2, 2, 1)
        images[:] = draws[:, None, None, None] + epoch
        self.report([SkippedImage("a.jpg", "it is empty")], 2)
        return Block(images, np.full(len(draws), os.getpid()), draws)

    def read_ahead(self) -> None:
        pass


def _new_pages() -> int:
    """Return the pages that the system gives to this process for a few photographs of 640 KB."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            photographs = [np.full(640 << 10, 1, np.uint8) for _ in range(3)]
            del photographs
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def open_readers(report: Report) -> list[Reader]:
    return [Reader(report)]


class Reading:
    """Processes that have started, and what they report."""

    def __init__(self, *, forks: bool = True) -> None:
        self.recorder = Recorder()
        self.decoders = Decoders(self.recorder, ROWS * ROW_BYTES, None if forks else start_processes([]))
        self.decoders.start(open_readers)


def block(reading: Reading, first: int, epoch: int = 0) -> Future[Block]:
    return reading.decoders.read(0, np.arange(first, first + ROWS), epoch)
