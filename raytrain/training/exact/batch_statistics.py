"""The arithmetic of synchronised batch norm: statistics of the global batch, and a gradient that passes through them.

:mod:`raytrain.training.exact.batchnorm` has the layers that use it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.exact import gather


class NormaliseTogether(torch.autograd.Function):
    """Batch norm with given statistics of the global batch, differentiated through them on all ranks.

    dx = w·s·(dy - Σdy / M - x̂·Σ(dy·x̂) / M), with x̂ = (x - mean)·s, s = 1 / sqrt(var + eps) and sums over the M
    values of a channel on all ranks (Ioffe and Szegedy 2015). In this formula, dy is the gradient of the loss of the
    global batch, but a rank has that of the mean over its own m_j images. So each rank multiplies its sums by
    ``weight_of_loss``, m_j, before they are added up, and divides the total by it afterwards: all gradients that are
    computed from dx are later multiplied by m_j / M. The gradients of weight and bias are those of this rank.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Normalise with the given statistics of the global batch; see :func:`global_statistics`."""
        x, weight, bias, mean, variance, total, weight_of_loss, ctx.eps, ctx.placeholder = inputs
        ctx.save_for_backward(x, weight, mean, variance, total, weight_of_loss)
        return F.batch_norm(x, mean, variance, weight, bias, eps=ctx.eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # for create_graph=True
            raise UsageError(
                "A gradient of gradients cannot pass batch norm that is joined over the workers; use a network without "
                'batch norm, or --batch-norm aggregate (batch_norm="aggregate").'
            )
        x, weight, mean, variance, total, weight_of_loss = ctx.saved_tensors
        invstd = torch.rsqrt(variance + ctx.eps)
        if ctx.placeholder:
            # Without images on this rank (x may have no rows, for which torch's kernel would crash), all gradients are
            # zeros, even if a loop's own loss counts the placeholder. The zeros depend on dy: otherwise torch.compile
            # would move their all-reduce into the forward, and the order of collectives would differ between workers.
            nothing = dy.sum().nan_to_num() * 0
            dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(weight) + nothing, torch.zeros_like(weight)
        else:
            # With training=False, the native kernel gives w·s·dy and this rank's Σ(dy·x̂) and Σdy.
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, mean, variance, mean, invstd, False, ctx.eps, [True, True, True]
            )
        # Join the sums over the ranks, and subtract the two terms of dx that contain them.
        if ctx.needs_input_grad[0]:
            sums = torch.stack([dweight, dbias]).mul_(weight_of_loss)  # (2, C)
            if world_size() > 1:
                dist.all_reduce(sums)
            if not ctx.placeholder:
                # They are -w·s·Σ(dy·x̂) / M · x̂ and -w·s·Σdy / M: of the form w'·x̂ + b', which batch_norm computes.
                sums *= -weight * invstd / (total * weight_of_loss)
                dx += F.batch_norm(x, mean, variance, *sums, eps=ctx.eps)
            else:
                # Use the result of the all-reduce, because torch.compile drops a collective whose result is unused.
                nothing = sums.sum() * 0
                dx, dweight, dbias = dx + nothing, dweight + nothing, dbias + nothing
        return dx, dweight, dbias, None, None, None, None, None, None  # one for each input of forward


def global_statistics(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean and biased variance (C,) of the global batch, and its number of values per channel (), at least 1.

    The fourth tensor is the number of different values per channel, of :func:`num_different`. All ranks call this. This
    one has ``count`` values of each channel in ``x``, (B, C, ...); 0 if ``x`` is a placeholder. The statistics of all
    ranks are joined by the formula of Chan, Golub and LeVeque (1983), in float32, or in float64 for float64 images.
    """
    # One row per rank: its count, means and variances (1 + 2C), all 0 for a placeholder.
    dtype = torch.promote_types(x.dtype, torch.float32)
    row = torch.zeros(1, 1 + 2 * x.shape[1], dtype=dtype, device=x.device)
    if count > 0:
        buffers = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)  # the kernel computes in their dtype
        row[0, 0] = count
        row[0, 1:] = torch.cat(torch.batch_norm_update_stats(x, buffers[0], buffers[1], 0.0))
    rows = all_ranks(row) if world_size() > 1 else row
    counts, means, variances = rows.split([1, x.shape[1], x.shape[1]], dim=1)  # (N, 1), (N, C), (N, C)
    total = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    different = num_different(counts, means, variances, total) if gather.num_gathers else total
    return mean, variance, total, different


def num_different(counts: Tensor, means: Tensor, variances: Tensor, total: Tensor) -> Tensor:
    """Return how many of the ``total`` values of a channel are different ones, (C,), from the statistics of each rank.

    If a loop gives rows of ``run.gather`` to a network, each rank has the same rows, which count once. Then the ranks
    have the same statistics to the last bit: ``counts`` (N, 1) or (N, C), ``means`` and ``variances`` (N, C). A rank
    with a count of 0 has a placeholder. Equal rows change neither mean nor biased variance, only the unbiased one.
    """
    has_values = counts > 0
    is_equal = torch.ones_like(total, dtype=torch.bool)
    for statistic in (counts, means, variances):
        largest = torch.where(has_values, statistic, -torch.inf).amax(0)
        is_equal = is_equal & (largest == torch.where(has_values, statistic, torch.inf).amin(0))
    return torch.where(is_equal, counts.amax(0), total)


def all_ranks(row: Tensor) -> Tensor:
    """Return the ``row``, (1, ...), of each rank of the default process group, (N, ...)."""
    rows = row.new_empty(world_size(), *row.shape[1:])
    dist.all_gather_into_tensor(rows, row)
    return rows


def unbiased(variance: Tensor, count: Tensor) -> Tensor:
    """Return the unbiased variance of ``count`` values with this biased ``variance``."""
    return variance * count / (count - 1).clamp(min=1)


def world_size() -> int:
    """Return the number of workers of the default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
