"""The one small all-reduce of a step: counts, votes and the metrics of the step before, read late."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class StepTotals:
    """Sums over all workers, as they came with one step's all-reduce."""

    used: float  # samples of this step's global batch that could be used
    wait_s: float  # seconds that the workers waited for this step's data
    stop_votes: float  # workers that want to stop
    save_votes: float  # workers that want a checkpoint
    left: float  # workers whose loop has returned
    previous: dict[str, float]  # what was logged in the step before, summed over the used samples


@dataclass(frozen=True)
class StepVote:
    """What one worker says at the beginning of a step, besides its metrics; the numbers of :class:`StepTotals`."""

    used: int = 0
    wait_s: float = 0.0
    stop: bool = False
    save: bool = False
    left: bool = False


class StepReduce:
    """Starts the all-reduce of a step before its forward, gives the used count to its backward, and is read after it.

    Nothing waits for the host: on a GPU the sums reach it by a copy that has long been done when it asks.
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

    def begin(self, vote: StepVote) -> None:
        """Send off this worker's part of a step, with what was logged in the step before."""
        now = torch.tensor([vote.used, vote.wait_s, vote.stop, vote.save, vote.left], dtype=torch.float64)
        self._sums = torch.cat([now.to(self._device, non_blocking=True), self._logged])
        self._logged = torch.zeros_like(self._logged)
        if self._world_size > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)
        self._pending = True

    def used(self) -> Tensor:
        """Used samples of the step's global batch, float64 on the device; the host goes on at once."""
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

    def add(self, sums: dict[str, Tensor], *, counts: bool) -> None:
        """Note this worker's sums of the step under their names; they travel with the next one. Without ``counts`` as zeros.

        Every worker notes the same names, in the same order.
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

    def read(self) -> StepTotals:
        """The step's sums on the host."""
        self.used()
        if self._copied is not None:
            self._copied.synchronize()
        used, wait_s, stop_votes, save_votes, left, *previous = self._host.tolist()
        return StepTotals(
            used, wait_s, stop_votes, save_votes, left, dict(zip(self._names, previous, strict=False))
        )  # a name that is new has no sum yet
