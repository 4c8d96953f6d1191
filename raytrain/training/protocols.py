"""What a run needs of whoever starts it: shares of images, and somebody who hears its news."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from raytrain.data.local_batch import LocalBatch


class BatchSource(Protocol):
    """Where a worker's shares come from."""

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """The worker's shares from ``first_step`` (counted from 0) to the end of the plan."""
        ...

    def test(self) -> Iterator[LocalBatch]:
        """The worker's part of the test images, each image on one worker."""
        ...


class Reporter(Protocol):
    """Where a worker's news go; every call returns at once, but for ``flush``."""

    def started(self, num_workers: int, step: int) -> None: ...
    def record(self, row: dict[str, Any]) -> None: ...
    def event(self, text: str) -> None: ...
    def flush(self) -> None: ...  # returns when all rows so far are in storage
    def stop_requested(self) -> bool: ...
    def save_requested(self) -> bool: ...  # True once for each reason to make a checkpoint now
