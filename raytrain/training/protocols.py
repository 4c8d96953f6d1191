"""Interfaces of what a run is given: its worker, its source of images, and its reporter of metrics and events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from raytrain.data.blocks import LocalBatch
from raytrain.data.labels.part_names import Part
from raytrain.monitor.events import Event
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkippedImage, SuspiciousLabel


@dataclass(frozen=True)
class Worker:
    """One of the ``world_size`` workers of a run, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def here(cls, device: torch.device) -> Worker:
        """Return this process's worker of the default process group; the only worker if there is no group."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)


class BatchSource(Protocol):
    """Source of a worker's local batches, which are made of images on the host."""

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """Yield the worker's local batches from ``first_step`` (counted from 0) to the end of the plan."""
        ...

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        """Yield the worker's slice of the validation or the test images, as ``part`` says.

        Each image is on one worker.
        """
        ...

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        """Return the keys of images of a ``part``; ``samples`` are their indices into its manifest."""
        ...


class DecodeReporter(Protocol):
    """Takes reports of training images that a worker could not read, or not decode on its GPU."""

    def note_skipped(self, images: list[SkippedImage], /) -> object:
        """Note training images that cannot be read, and are therefore not used."""

    def note_decoded_on_cpu(self, num_images: int, reason: str, /) -> object:
        """Note that a GPU could not decode ``num_images`` of the kind ``reason``, such as "PNG", and a CPU did."""


class Reporter(DecodeReporter, Protocol):
    """Takes metrics (of worker 0) and events of a worker, and passes requests on to it.

    All calls but ``flush`` return at once.
    """

    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None:
        """Note that ``num_workers`` workers begin to train, after ``step`` completed steps.

        With ``measures_again``, they measure the state after these steps, of which an earlier attempt may have a row.
        """

    def record(self, row: MetricRow) -> None:
        """Add a row to the run's metrics history."""

    def note_machine_use(self, use: MachineUse) -> None:
        """Note how fast this worker is and how its machine is used. Every worker calls this every few seconds."""

    def note_event(self, event: Event) -> None:
        """Note an event that whoever watches the run should read."""

    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None:
        """Note the ``place`` in the code where worker ``rank`` waits long for the others; None once it has continued.

        While it waits, this is called again and again.
        """

    def replace_suspicious_labels(self, labels: Sequence[SuspiciousLabel]) -> None:
        """Replace the list of training images whose labels look wrong; the worst comes first."""

    def flush(self) -> None:
        """Wait until all rows so far are in storage. Raises StorageError if they cannot be written."""

    def stop_requested(self) -> bool:
        """Return whether somebody has asked the run to stop."""
        ...

    def checkpoint_requested(self) -> bool:
        """Return whether somebody has asked for a checkpoint since the last call."""
        ...
