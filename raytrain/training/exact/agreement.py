"""Checks that all workers have the same tensors, names and metrics.

If training is correct, all workers have the same weights after each step, call the run equally often, and log the same
names. Comparing the weights themselves would take as much traffic as the gradients, so digests are compared: four sums
of a tensor, or a number d and its square for anything else. One all-reduce adds up both over the N workers, and
(Σd)² = N · Σd² if and only if all numbers d are equal (Cauchy and Schwarz).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore

from raytrain.errors import UsageError
from raytrain.runs.metric_row import OWN_COLUMNS

_NOT_A_NUMBER, _INFINITE = 2e299, 1e300  # stand for NaN and infinity in sums that are compared
_PIECE = 6 * 2**20  # elements; a multiple of 2 and 3, as sums are also of every second and every third one
_ROUNDINGS = 16  # rounding errors by which a tensor may differ after a step, relative to its norm


def find_not_on_all(tensors: Mapping[str, Tensor], world_size: int) -> list[str]:
    """Return the names of ``tensors`` that some workers lack, or have in another shape or type.

    Every worker calls this, and gets the same names.
    """
    # Usually all workers have the same, which one number of each shows.
    kinds = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, zlib.crc32(repr(sorted(kinds.items())).encode()))
    if len(set(digests)) == 1:
        return []

    kinds_of_workers: list[Any] = [None] * world_size
    dist.all_gather_object(kinds_of_workers, kinds)
    names = dict.fromkeys(name for of_worker in kinds_of_workers for name in of_worker)  # each once, in order
    return [name for name in names if len({of_worker.get(name) for of_worker in kinds_of_workers}) > 1]


@torch.no_grad()
def find_differing(tensors: Mapping[str, Tensor], step: int, device: torch.device) -> list[str]:
    """Return the names of the ``tensors`` that differ between workers after ``step`` completed steps.

    Every worker calls this with tensors of the same names and shapes, and gets the same names. Sums of the tensors are
    compared, by one small all-reduce for all of them, for which the host waits once. Different kinds of processors
    round differently, so the sums may differ by the precision of the numbers.
    """
    if not tensors:
        return []
    # Optimizers keep some numbers on the CPU; the workers compare all of them on their ``device``.
    digests = torch.stack([_digest(tensor).to(device) for tensor in tensors.values()])  # (T, 4)
    # The largest of all workers' -x is minus the smallest x, so one all-reduce gives both extremes.
    extremes = torch.stack([digests, -digests])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    spread = (extremes[0] + extremes[1]).amax(dim=1)  # (T,), the largest difference in any of the four sums
    # The sum of random rounding errors grows with the square root of their number. Integers must not differ at all.
    precisions = [
        torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0
        for tensor in tensors.values()
    ]
    rounding = torch.tensor([_ROUNDINGS * precision for precision in precisions], dtype=torch.float64)
    norms = extremes[0, :, -1]
    allowed = rounding.to(spread.device) * max(step, 1) ** 0.5 * norms
    return [name for name, differs in zip(tensors, (spread > allowed).tolist(), strict=True) if differs]


def has_digest(tensor: Any) -> bool:
    """Return whether ``tensor`` is a plain tensor with numbers in it, which :func:`digest_of_tensors` can add up.

    Sparse, quantized and lazy tensors are not, nor are those with which torch.compile and vmap trace a function.

    Example: ``digests = digest_of_tensors(filter(has_digest, network.buffers()))``
    """
    if type(tensor) not in (Tensor, nn.Parameter) or is_functorch_wrapped_tensor(tensor):
        return False
    is_plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return is_plain and tensor.device.type != "meta" and tensor.numel() > 0


def digest_of_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Return four sums of each of the k ``tensors``, float64 (k, 4), on their device. They change if a tensor does."""
    digests = [_digest(tensor.detach()) for tensor in tensors]
    return torch.stack(digests) if digests else torch.zeros(0, 4, dtype=torch.float64)


def _digest(tensor: Tensor) -> Tensor:
    """Return the sums of all, of every second and of every third element of ``tensor``, and its norm: float64 (4,).

    So elements that change places change the digest, too. NaN and infinity are replaced by numbers, which can be
    compared.
    """
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if len(values) <= _PIECE:
        sums = _sums(values)
    else:
        sums_of_pieces = torch.stack([_sums(piece) for piece in values.split(_PIECE)])  # (pieces, 4)
        sums = torch.cat([sums_of_pieces[:, :3].sum(dim=0), torch.linalg.vector_norm(sums_of_pieces[:, 3:], dim=0)])
    return sums.nan_to_num(nan=_NOT_A_NUMBER, posinf=_INFINITE, neginf=-_INFINITE)


def _sums(values: Tensor) -> Tensor:
    """Return the sums of all, of every second and of every third of the ``values``, and their norm: float64 (4,)."""
    values = values.double()
    return torch.stack([*(values[::stride].sum() for stride in (1, 2, 3)), torch.linalg.vector_norm(values)])


def digest_of(value: object) -> tuple[int, int]:
    """Return a number for ``value``, of its ``repr``, and the number's square, for :func:`digests_agree`.

    The number has 20 bits, so that the sums of both over the workers are exact in float64.

    Example::

        number, square = digest_of(("loss", "accuracy"))
        # after an all-reduce of both
        digests_agree((sum_of_numbers, sum_of_squares), world_size)
    """
    number = zlib.crc32(repr(value).encode()) & 0xFFFFF
    return number, number**2


def digests_agree(sums: Sequence[float], world_size: int) -> bool:
    """Return whether all workers had equal numbers.

    ``sums`` are the sums over the workers of both numbers of :func:`digest_of`.
    """
    sum_of_numbers, sum_of_squares = map(int, sums)
    return sum_of_numbers**2 == sum_of_squares * world_size


def agreed(measured: Mapping[str, Any], world_size: int) -> dict[str, float]:
    """Return, on all workers, the metrics that an evaluation has ``measured`` on worker 0.

    Raises UsageError if ``measured`` is no mapping of names to numbers, or has a name that the history uses itself. It
    is raised on all workers if they have measured different values, by which some would stop and others go on.
    """
    # Check this worker's own numbers.
    try:
        numbers = {name: float(value) for name, value in measured.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"The loop's evaluation must return numbers by name, and returned something else: {error}."
        ) from None
    if taken_names := [name for name in numbers if name in OWN_COLUMNS]:
        raise UsageError(
            f"The loop's evaluation returned {taken_names[0]}, which the metrics history has already; give it another "
            "name."
        )

    # Compare the numbers of all workers; rounding may differ between kinds of processors.
    numbers_of_workers: list[Any] = [numbers] * world_size
    if world_size > 1:
        dist.all_gather_object(numbers_of_workers, numbers)
    for rank, of_worker in enumerate(numbers_of_workers):
        for name in {**numbers_of_workers[0], **of_worker}:
            first, second = numbers_of_workers[0].get(name), of_worker.get(name)
            if first is None or second is None or not np.isclose(first, second, rtol=1e-6, atol=0, equal_nan=True):
                raise UsageError(
                    f"The loop's evaluation measured {name} {first} on worker 0 and {second} on worker {rank}; add up "
                    "what each worker counts with run.total(...), so that all have the same numbers."
                )
    return numbers_of_workers[0]
