"""Sums numbers over the workers: they are sent as bfloat16, which takes half the bytes, and added up in float32.

An all-reduce of N workers sends each number 2 (N - 1) / N times, in the same type in which it adds up. But a sum in
bfloat16, which has 8 bits, loses small terms. So this sum consists of two collectives of bytes, which every backend
has, and an addition between them::

    round        each worker rounds its numbers to bfloat16, and cuts them into N parts
    all-to-all   worker i gets the i-th part of every worker
    add          worker i adds these N parts in float32, and rounds the sum
    all-gather   each worker gets the N rounded sums, including its own, so that all have the same

A number is rounded once before the addition and once after it, each time by at most 2⁻⁹ of itself, on any number of
workers. Terms are added in the order of ranks, so the result is always the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_stream = cache(torch.cuda.Stream)  # one for each GPU, on which sums are computed beside its other work


class Bfloat16Sum:
    """The sum of ``numbers``, float32 (n,), over the ``world_size`` workers, which begins at once.

    :meth:`wait` writes it over the numbers. On a GPU, it runs beside other computations. On a CPU, the addition needs a
    call of :meth:`add_up` once the all-to-all is done. Workers may call that at different times, because the
    all-gathers have a group of their own, in which their order is the same on all workers.

    Args:
        groups: the process groups of the all-to-all and of the all-gather.

    Example::

        total = Bfloat16Sum(numbers, (first_group, second_group), world_size=4)
        total.wait()  # numbers are the sums now
    """

    def __init__(self, numbers: Tensor, groups: tuple[Any, Any], world_size: int) -> None:
        self._numbers, self._world_size = numbers, world_size
        self._all_gather_group = groups[1]
        self._gathering: dist.Work | None = None
        with self._beside_the_device():
            # Zeros fill up the last part, so that all N have the same size.
            num_in_part = -(-len(numbers) // world_size)  # rounded up
            self._rounded = numbers.new_zeros(world_size * num_in_part, dtype=torch.bfloat16)
            self._rounded[: len(numbers)] = numbers
            self._parts = torch.empty_like(self._rounded)  # this worker's part of the numbers of each worker
            sent, received = (tensor.view(torch.uint8) for tensor in (self._rounded, self._parts))
            work = dist.all_to_all_single(received, sent, group=groups[0], async_op=True)
            assert work is not None
            self._sending = work
        if numbers.is_cuda:
            self.add_up()

    def is_sent(self) -> bool:
        """Return whether the all-to-all is done, so that :meth:`add_up` would not wait."""
        return self._sending.is_completed()

    def add_up(self) -> None:
        """Wait for the all-to-all, add up this worker's part, and begin to send its sum to all workers.

        Further calls do nothing.
        """
        if self._gathering is not None:
            return
        with self._beside_the_device():
            self._sending.wait()
            total = self._parts.view(self._world_size, -1).sum(dim=0, dtype=torch.float32).to(torch.bfloat16)
            # All sums are written over this worker's rounded numbers, which have been sent.
            sums, own_sum = (tensor.view(torch.uint8) for tensor in (self._rounded, total))
            self._gathering = dist.all_gather_into_tensor(sums, own_sum, group=self._all_gather_group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum, and write it over the numbers. On a GPU, the stream waits, not the host."""
        self.add_up()
        assert self._gathering is not None
        self._gathering.wait()
        self._numbers.copy_(self._rounded[: len(self._numbers)])
        # On a GPU, tell torch that this stream still reads the memory, which the next sum could get otherwise.
        if self._numbers.is_cuda:
            self._rounded.record_stream(torch.cuda.current_stream(self._numbers.device))

    def _beside_the_device(self) -> AbstractContextManager[Any]:
        """Return a context whose work on a GPU waits for work queued before it, but does not delay work after it."""
        if not self._numbers.is_cuda:
            return nullcontext()
        beside, computing = _stream(self._numbers.device), torch.cuda.current_stream(self._numbers.device)
        beside.wait_stream(computing)
        return torch.cuda.stream(beside)
