"""A run's surroundings: the worker that it runs on, its source of images, and its reporter of metrics and events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from raytrain.data.blocks import LocalBatch
from raytrain.monitor.events import Event
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow


@dataclass(frozen=True)
class Worker:
    """One of the ``world_size`` workers of a run, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def here(cls, device: torch.device) -> Worker:
        """This process's place in the default process group; the only worker if there is none."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)


class BatchSource(Protocol):
    """Where a worker's images come from."""

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """The worker's local batches from ``first_step`` (counted from 0) to the end of the plan."""
        ...

    def test(self) -> Iterator[LocalBatch]:
        """The worker's slice of the test images. Each image is on one worker."""
        ...


class Reporter(Protocol):
    """Takes a worker's metrics (worker 0's) and events, passes requests on to it; all but ``flush`` returns at once."""

    def started(self, num_workers: int, step: int) -> None:
        """The workers start, or resume, after ``step`` completed steps."""

    def record(self, row: MetricRow) -> None:
        """Add a row to the run's metrics history."""

    def measured(self, use: MachineUse) -> None:
        """Note how fast this worker is and how its machine is used. Every worker reports it every few seconds."""

    def event(self, event: Event) -> None:
        """Note something that whoever watches the run should read."""

    def waits(self, rank: int, num_workers: int, place: str | None) -> None:
        """Note where worker ``rank`` waits for the others, again and again; None once after it does so no more."""

    def flush(self) -> None:
        """Return when all rows so far are in storage; raises StorageError if they cannot be written."""

    def stop_requested(self) -> bool:
        """Whether somebody asked the run to stop."""
        ...

    def checkpoint_requested(self) -> bool:
        """Whether a checkpoint should be written now. True once for each request."""
        ...
