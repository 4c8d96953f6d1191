"""The one small all-reduce of a step: counts, requests, and the metrics of the step before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class StepContribution:
    """What one worker contributes to the all-reduce of a step, besides its metrics of the step before."""

    num_used: int = 0  # images of its local batch that can be used
    wait_s: float = 0.0  # seconds that it waited for its local batch
    stop_requested: bool = False
    checkpoint_requested: bool = False
    loop_returned: bool = False  # before the end of the run


@dataclass(frozen=True)
class StepTotals:
    """The contributions to a step, summed over all workers."""

    num_used: int
    wait_s: float
    stop_requests: int
    checkpoint_requests: int
    loops_returned: int
    logged_before: Mapping[str, float]  # what was logged in the step before, summed over the used images


class StepReduce:
    """Starts a step's all-reduce before the forward, gives the number of used images to the backward, then the totals.

    The host waits for nothing: on a GPU the totals reach it by a copy that has long finished when they are read.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size
        self._names: tuple[str, ...] = ()
        self._logged = torch.zeros(0, dtype=torch.float64, device=device)
        self._host = self._sums = torch.zeros(5, dtype=torch.float64)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._work: dist.Work | None = None
        self._pending = False

    def start(self, own: StepContribution) -> None:
        """Send this worker's contribution to a step, with what it logged in the step before."""
        values = [own.num_used, own.wait_s, own.stop_requested, own.checkpoint_requested, own.loop_returned]
        contribution = torch.tensor(values, dtype=torch.float64)
        self._sums = torch.cat([contribution.to(self._device, non_blocking=True), self._logged])
        self._logged = torch.zeros_like(self._logged)
        if self._world_size > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)
        self._pending = True

    def num_used(self) -> Tensor:
        """Number of used images in the step's global batch, float64 () on the device. The host does not wait for it."""
        if self._pending:
            if self._work is not None:
                self._work.wait()
            if len(self._host) != len(self._sums):
                self._host = torch.zeros(len(self._sums), dtype=torch.float64, pin_memory=self._device.type == "cuda")
            self._host.copy_(self._sums, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._pending = False
        return self._sums[0]

    def log(self, sums: Mapping[str, Tensor], *, counts: bool) -> None:
        """Add to this worker's sums of the step, which travel with the next step.

        They are 0 without ``counts``: the images are a placeholder. Every worker logs the same names in the same order.
        """
        new = tuple(name for name in sums if name not in self._names)
        if new:
            self._names += new
            self._logged = torch.cat([self._logged, self._logged.new_zeros(len(new))])
        if counts:
            values = torch.stack([value.detach().double() for value in sums.values()])
            if tuple(sums) == self._names:
                self._logged += values
            else:
                self._logged[[self._names.index(name) for name in sums]] += values

    def totals(self) -> StepTotals:
        """The totals of the step, on the host."""
        self.num_used()
        if self._copied is not None:
            self._copied.synchronize()
        num_used, wait_s, stops, checkpoints, returned, *logged = self._host.tolist()
        logged_before = dict(zip(self._names, logged, strict=False))  # a name that is new has no sum yet
        return StepTotals(int(num_used), wait_s, int(stops), int(checkpoints), int(returned), logged_before)
