"""Gathers the rows of all workers on each worker; gradients flow back to the worker from which a row comes.

A contrastive loss compares the features of all images of a global batch, so each worker needs the features of all
workers. Every worker computes the whole loss, and so the gradient of each row is computed N times. The mean of these
gradients goes back to the worker that has the row, where the backward goes on.

That is right for ``loss.backward()``, whose gradients are summed over the workers afterwards. What
``torch.autograd.grad`` returns is that of one worker's rows, and cannot be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.errors import UsageError

num_backwards = 0
"""Number of times that a gradient has passed rows of other workers in this process, which shows whether one has."""

num_gathers = 0
"""Number of times that rows have been gathered in this process, as in all others: batch norm may get the same rows."""


def gather_rows(rows: Tensor, share: Callable[[], Tensor | float]) -> Tensor:
    """Return the ``rows``, (n, ...), of all workers in their order, (sum of n, ...); every worker has its own n.

    Each worker computes the same loss of all rows, and it must count once. So the gradients of a row are averaged over
    the workers. The gradient of worker j, which has m_j of the M images, has the weight m_j / M, which ``share``
    returns. The worker that has the row gets the average divided by its own weight, because its gradients are
    multiplied by it when they reach the parameters.

    Example::

        features = gather_rows(network(images), share)  # (M, F), from (m, F) on each worker
    """
    global num_gathers
    num_gathers += 1
    # The host waits for the numbers of rows, because it must know the size of what it gathers.
    world_size = dist.get_world_size()
    counts = rows.new_zeros(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(counts, torch.tensor([len(rows)], device=rows.device))
    sizes: list[int] = counts.tolist()
    return _GatherRows.apply(rows, sizes, dist.get_rank(), share)  # pyright: ignore[reportReturnType]


class _GatherRows(torch.autograd.Function):
    """Gathers rows, and averages the gradients that all workers give to them; see :func:`gather_rows`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Return the rows of all workers.

        Inputs: this worker's rows, the number of rows of each worker, this worker's rank, a function that returns
        m_j / M.
        """
        rows, ctx.sizes, ctx.rank, ctx.share = inputs
        longest, width = max(ctx.sizes), math.prod(rows.shape[1:])  # width: numbers in a row
        # Send bytes, which gloo and NCCL can do for any type, all of one size: fewer rows are filled up with zeros.
        sent = torch.zeros(longest * width * rows.element_size(), dtype=torch.uint8, device=rows.device)
        as_bytes = rows.detach().contiguous().reshape(-1).view(torch.uint8)
        sent[: len(as_bytes)] = as_bytes
        together = sent.new_empty(len(ctx.sizes) * len(sent))
        dist.all_gather_into_tensor(together, sent)
        padded = together.view(rows.dtype).view(len(ctx.sizes), longest, *rows.shape[1:])
        return torch.cat([rows_of_worker[:size] for rows_of_worker, size in zip(padded, ctx.sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of this worker's rows: the average over the workers, divided by this worker's share.

        Raises UsageError if the gradient is to be differentiated again, as the sum over the workers cannot be.
        """
        global num_backwards
        num_backwards += 1
        if torch.is_grad_enabled():  # for create_graph=True
            raise UsageError(
                "A gradient of gradients cannot pass run.gather: gather what the network gets, as in "
                "run.gather(batch.images), so that each worker computes with all images; or train on one worker."
            )
        share = ctx.share()
        # A worker without images does not count in the average: its share is the number 0.
        has_images = isinstance(share, Tensor) or share > 0
        average = (gradient * share if has_images else torch.zeros_like(gradient)).contiguous()
        dist.all_reduce(average)
        average_of_rows = average.split(ctx.sizes)[ctx.rank]
        return average_of_rows / share if has_images else average_of_rows, None, None, None
