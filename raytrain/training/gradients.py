"""Averages gradients over the workers while the backward still runs, and checks that their weights stay the same.

Nothing is wrapped: hooks on the parameters tell which gradients are there. They travel in buckets of a fixed order, as
those of DistributedDataParallel (Li et al. 2020). If some workers have no gradient for a parameter, theirs is zero; if
none has, it stays without: so unused layers, layers left out at random and unfrozen ones train as on one worker.
"""

from __future__ import annotations

import gc
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.training.protocols import Worker

_NOT_A_NUMBER, _INFINITE = 2e299, 1e300
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule"}  # of torch
_FIRST_BYTES, _BYTES = 1 << 20, 25 << 20  # size of the first bucket, which is sent early, and of the others


class JoinedGradients:
    """The gradients of all networks that a loop has prepared, averaged over the workers."""

    def __init__(self, worker: Worker) -> None:
        self._world_size = worker.world_size
        # In a backward, collectives of batch norm come in another order on each worker.
        self._group = own_group(worker.device) if worker.world_size > 1 else None
        self._parameters: list[Tensor] = []
        self._buckets: list[Bucket] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._num_sent = 0
        self._backward: Literal["the loop's", "a part", "the last part"] = "the loop's"
        self._before: set[int] = set()  # the parameters that got a gradient in the parts before the last, by their IDs
        self._unjoined: list[Tensor] = []  # those that may have one of a backward of the loop's own

    def backward(self, loss: Tensor, parameters: list[Tensor], *, joins: bool) -> None:
        """Backpropagate ``loss``; with ``joins``, the gradients of ``parameters`` are then all workers'.

        An average of what is equal on all workers stays as it is: gradients that were joined before may be in them.
        """
        if self._world_size == 1:
            loss.backward()
            return
        self._follow(parameters)
        self._check_unjoined()
        for bucket in self._buckets:
            bucket.arrived.clear()
        self._num_sent = 0
        self._backward = "the last part" if joins else "a part"
        try:
            loss.backward()
        finally:
            self._backward = "the loop's"
        if joins:
            self._send_all()
            for bucket in self._buckets:
                bucket.receive()

    def _check_unjoined(self) -> None:
        """Raise UsageError if a parameter has a gradient of a backward that was not the run's."""
        if any(each.grad is not None and bool(each.grad.any()) for each in self._unjoined):
            raise UsageError(
                "The loop calls loss.backward() itself, which gives the gradients of one worker's images: call "
                "run.backward(loss) in its place, or optimizer.zero_grad() before run.backward; or train on one worker."
            )
        self._unjoined.clear()

    def _follow(self, parameters: list[Tensor]) -> None:
        """Divide ``parameters`` into buckets, unless they are the same as before."""
        if len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters)):
            return
        unique = list({id(each): each for each in parameters}.values())
        for hook in self._hooks:
            hook.remove()
        for each in unique:
            _check_hooks(each)
        if not self._parameters:
            self._unjoined = unique
        self._parameters = parameters
        self._buckets = [Bucket(each) for each in _divided(unique[::-1])]  # the last layers' gradients come first
        self._bucket_of = {id(each): bucket for bucket in self._buckets for each in bucket.parameters}
        self._hooks = [each.register_post_accumulate_grad_hook(self._arrived) for each in unique]

    def _arrived(self, parameter: Tensor) -> None:
        if self._backward == "the last part":
            bucket = self._bucket_of[id(parameter)]
            bucket.arrived.add(id(parameter))
            if len(bucket.arrived) == len(bucket.parameters):
                self._send_complete()
        elif self._backward == "a part":
            self._before.add(id(parameter))
        else:
            self._unjoined.append(parameter)

    def _send_complete(self) -> None:
        """Send, in their order, the buckets that are complete."""
        for bucket in self._buckets[self._num_sent :]:
            if len(bucket.arrived) < len(bucket.parameters):
                return
            bucket.send(self._world_size, self._group)
            self._num_sent += 1

    def _send_all(self) -> None:
        """Send the buckets that are left."""
        for bucket in self._buckets[self._num_sent :]:
            bucket.arrived |= self._before.intersection(map(id, bucket.parameters))
            bucket.send(self._world_size, self._group)
        self._before.clear()


class Bucket:
    """Parameters of one kind, whose gradients are views of one tensor, which is sent as a whole."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.arrived: set[int] = set()  # the parameters that got a gradient in this backward, by their IDs
        self._renew()

    def _renew(self) -> None:
        sizes = [each.numel() for each in self.parameters]
        # The gradients in a row, and for each of them whether there is one, as a number that is not 0.
        self._flat = self.parameters[0].new_empty(sum(sizes) + len(sizes))
        *rows, self._flags = self._flat.split([*sizes, len(sizes)])
        self._views = [_like(parameter, row) for parameter, row in zip(self.parameters, rows, strict=True)]

    @torch.no_grad()
    def send(self, world_size: int, group: Any) -> None:
        """Start to average the gradients."""
        if not all(parameter.grad is view for parameter, view in zip(self.parameters, self._views, strict=True)):
            del self._flat, self._flags, self._views  # the memory
            self._renew()  # a loop may keep the gradients of another backward
        has = [id(each) in self.arrived for each in self.parameters]
        if all(has):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(has))
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:  # also one of an earlier backward, which is the same on all workers
                _check_dense(parameter)
                torch.mul(parameter.grad, 1 / world_size, out=view)
                parameter.grad = view
            else:
                view.zero_()
        self._work: dist.Work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self) -> None:
        """Wait for the averages; where no worker has a gradient, the parameter's stays as it was."""
        self._work.wait()
        if len(self.arrived) < len(self.parameters):
            for parameter, view, flag in zip(self.parameters, self._views, self._flags.tolist(), strict=True):
                if flag and id(parameter) not in self.arrived:
                    parameter.grad = view


def check_not_wrapped(parameters: Iterable[Tensor]) -> None:
    """Raise UsageError if one of torch's wrappers, which join gradients themselves, holds any of ``parameters``.

    A wrapper leaves no trace in what it holds, so all objects of this process are looked at, which takes 0.1 s.
    """
    ours = set(map(id, parameters))
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if _WRAPPERS & {base.__name__ for base in kind.__mro__}}
    for wrapper in (each for each in (objects if kinds else ()) if type(each) in kinds):
        if not ours.isdisjoint(map(id, wrapper.parameters())):
            raise UsageError(
                f"The loop puts a network of run.prepare, or a layer of one, into a {type(wrapper).__name__}, which "
                "would join gradients a second time; leave that out and call the network itself: it trains on any "
                "number of workers."
            )


def own_group(device: torch.device) -> Any:
    """A process group beside the default one, for collectives that others must not come between."""
    default: Any = dist.group.WORLD
    return dist.new_group(timeout=default._get_backend(device).options._timeout)


def broadcast_weights(model: nn.Module) -> None:
    """Give ``model`` the parameters and buffers that it has on worker 0."""
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]
    rows = [each.reshape(-1).view(torch.uint8) for each in tensors]  # bytes: one broadcast for all types
    if not rows:
        return
    together = torch.cat(rows)
    dist.broadcast(together, src=0)
    for tensor, row in zip(tensors, together.split([len(each) for each in rows]), strict=True):
        tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))  # a clone begins at an address for any type


@torch.no_grad()
def differing(tensors: Mapping[str, Tensor], step: int) -> list[str]:
    """Names of the ``tensors`` that are not the same on all workers after ``step`` steps; the same on each worker.

    Sums are compared, not the tensors: the host waits for the device once, and one small all-reduce serves all.
    Processors of several kinds round in different ways, so numbers may drift apart by their precision.
    """
    if not tensors:
        return []
    digests = torch.stack([_digest(tensor) for tensor in tensors.values()])  # (T, 4)
    extremes = torch.stack([digests, -digests])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    spread = (extremes[0] + extremes[1]).amax(dim=1)
    rounding = torch.tensor([_rounding(tensor) for tensor in tensors.values()], dtype=torch.float64)
    allowed = rounding.to(spread.device) * max(step, 1) ** 0.5 * extremes[0, :, -1]
    return [name for name, differs in zip(tensors, (spread > allowed).tolist(), strict=True) if differs]


def digest_of(value: object) -> tuple[int, int]:
    """A number for a value that must be the same on all workers, and its square: their sums are exact in float64."""
    number = zlib.crc32(repr(value).encode()) & 0xFFFFF
    return number, number**2


def digests_agree(sums: Sequence[float], world_size: int) -> bool:
    """Whether the digests of all workers are the same, told by their ``sums``."""
    digests, squares = map(int, sums)
    return digests**2 == squares * world_size


def _digest(tensor: Tensor) -> Tensor:
    """Sums of all, of each second and of each third element, and the norm: float64 (4,). NaN becomes a number."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    sums = [values[::stride].sum(dtype=torch.float64) for stride in (1, 2, 3)]
    norm = torch.linalg.vector_norm(values if values.is_floating_point() else values.double(), dtype=torch.float64)
    return torch.stack([*sums, norm]).nan_to_num(nan=_NOT_A_NUMBER, posinf=_INFINITE, neginf=-_INFINITE)


def _rounding(tensor: Tensor) -> float:
    """By how much of its norm a tensor may differ in a step; nothing if it holds integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return 16 * torch.finfo(tensor.dtype).eps


def _check_hooks(parameter: Any) -> None:
    """Raise UsageError if the loop or its network has hooks on ``parameter``: they would get one worker's gradient."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise UsageError(
            f"A hook of a parameter of the shape {tuple(parameter.shape)} would get the gradient of one worker's "
            "images alone; change the gradient (parameter.grad) between run.backward and run.step instead, or train on "
            "one worker."
        )


def _check_dense(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise UsageError(
            f"A parameter of the shape {tuple(parameter.shape)} gets a sparse gradient, which is not averaged over the "
            "workers; make its layer with sparse=False and take an optimizer for that, or train on one worker."
        )


def _divided(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in buckets of one type and device each."""
    bucket: list[Tensor] = []
    num_bytes, limit = 0, _FIRST_BYTES
    for parameter in parameters:
        is_other = bucket and (parameter.dtype, parameter.device) != (bucket[0].dtype, bucket[0].device)
        if is_other or num_bytes >= limit:
            yield bucket
            bucket, num_bytes, limit = [], 0, _BYTES
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield bucket


def _like(parameter: Tensor, row: Tensor) -> Tensor:
    """``row``, (n,), in the shape and the order in memory of ``parameter``."""
    is_dense = parameter.is_contiguous() or (
        parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    return row.as_strided(parameter.shape, parameter.stride()) if is_dense else row.view(parameter.shape)
