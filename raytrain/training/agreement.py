"""Checks that all workers have the same, by small sums of it, and gives them the weights of worker 0.

Workers that compute what one would have the same weights after each step, call the run equally often, and log the same
names. To compare all of that would take as much traffic as the gradients, so digests of it are compared: of a tensor
four sums, of anything else a number d and its square. One all-reduce adds up both over the N workers, and (Σd)² = N ·
Σd² if and only if all numbers are the same (Cauchy and Schwarz).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.runs.metric_row import OWN_COLUMNS

_NOT_A_NUMBER, _INFINITE = 2e299, 1e300  # what stands for them in sums that are compared
_ROUNDINGS = 16  # by how many a tensor may differ in a step, relative to its norm


def broadcast_weights(model: nn.Module) -> None:
    """Give ``model`` the parameters and buffers that it has on worker 0."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]  # bytes: one broadcast for all types
    if not rows:
        return
    together = torch.cat(rows)
    dist.broadcast(together, src=0)
    for tensor, row in zip(tensors, together.split([len(row) for row in rows]), strict=True):
        tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))  # a clone begins at an address for any type


def find_not_on_all(tensors: Mapping[str, Tensor], world_size: int) -> list[str]:
    """Return the names of ``tensors`` that some workers lack, or have in another shape or type; the same on each."""
    kinds = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, zlib.crc32(repr(sorted(kinds.items())).encode()))
    if len(set(digests)) == 1:
        return []
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, kinds)
    names = {name: None for kinds in gathered for name in kinds}  # each once, in order
    return [name for name in names if len({kinds.get(name) for kinds in gathered}) > 1]


@torch.no_grad()
def find_differing(tensors: Mapping[str, Tensor], step: int, device: torch.device) -> list[str]:
    """Return the names of the ``tensors`` that differ between workers after ``step`` steps; the same on each worker.

    Sums are compared, not the tensors: the host waits for the device once, and one small all-reduce serves all.
    Processors of several kinds round in different ways, so numbers may drift apart by their precision.
    """
    if not tensors:
        return []
    # Optimizers keep some numbers on the CPU; the workers compare all of them on their ``device``.
    digests = torch.stack([_digest(tensor).to(device) for tensor in tensors.values()])  # (T, 4)
    extremes = torch.stack([digests, -digests])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    spread = (extremes[0] + extremes[1]).amax(dim=1)
    # Roundings of random directions grow with the square root of their number. Integers may not differ at all.
    precisions = [
        torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0
        for tensor in tensors.values()
    ]
    rounding = torch.tensor([_ROUNDINGS * precision for precision in precisions], dtype=torch.float64)
    allowed = rounding.to(spread.device) * max(step, 1) ** 0.5 * extremes[0, :, -1]
    return [name for name, differs in zip(tensors, (spread > allowed).tolist(), strict=True) if differs]


def digest_of_tensors(tensors: Iterable[Tensor]) -> list[float]:
    """Return four sums of each tensor: if one changes, so do they. The host waits for the device once."""
    digests = [_digest(tensor.detach()) for tensor in tensors]
    return torch.stack(digests).flatten().tolist() if digests else []


def _digest(tensor: Tensor) -> Tensor:
    """Return sums of all, of each second and of each third element, and the norm: float64 (4,).

    NaN and infinity become numbers, which can be compared.
    """
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    sums = [values[::stride].sum(dtype=torch.float64) for stride in (1, 2, 3)]
    norm = torch.linalg.vector_norm(values if values.is_floating_point() else values.double(), dtype=torch.float64)
    return torch.stack([*sums, norm]).nan_to_num(nan=_NOT_A_NUMBER, posinf=_INFINITE, neginf=-_INFINITE)


def digest_of(value: object) -> tuple[int, int]:
    """Return a number for ``value`` and its square, whose sums over the workers are exact in float64.

    Example::

        number, square = digest_of(("loss", "accuracy"))
        # after an all-reduce of both
        digests_agree((sum_of_numbers, sum_of_squares), world_size)
    """
    number = zlib.crc32(repr(value).encode()) & 0xFFFFF
    return number, number**2


def digests_agree(sums: Sequence[float], world_size: int) -> bool:
    """Return whether all workers have the same :func:`digest_of` something, given the ``sums`` of both numbers."""
    digests, squares = map(int, sums)
    return digests**2 == squares * world_size


def agreed(measured: Mapping[str, Any], world_size: int) -> dict[str, float]:
    """Return the metrics that an evaluation has ``measured``: those of worker 0, on all workers.

    Raises UsageError, on all of them, if they differ: they would decide differently whether to stop.
    """
    try:
        numbers = {name: float(value) for name, value in measured.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"The loop's evaluation must return numbers by name, and returned something else: {error}."
        ) from None
    if taken := [name for name in numbers if name in OWN_COLUMNS]:
        raise UsageError(
            f"The loop's evaluation returned {taken[0]}, which the metrics history has already; give it another name."
        )
    gathered: list[Any] = [numbers] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, numbers)
    for rank, other in enumerate(gathered):
        for name in {**gathered[0], **other}:
            first, second = gathered[0].get(name), other.get(name)
            if first is None or second is None or not np.isclose(first, second, rtol=1e-6, atol=0, equal_nan=True):
                raise UsageError(
                    f"The loop's evaluation measured {name} {first} on worker 0 and {second} on worker {rank}; add up "
                    "what each worker counts with run.total(...), so that all have the same numbers."
                )
    return gathered[0]
