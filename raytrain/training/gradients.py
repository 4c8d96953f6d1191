"""Exact gradients: after ``loss.backward()`` each ``parameter.grad`` is that of the whole global batch.

A loop computes the mean loss of this worker's images, as it would on one GPU. With m_j images on worker j and M of them
in the global batch, the loss of the global batch is the sum of (m_j / M) · mean_j over the workers. So everything that
arrives at a parameter during a backward is multiplied by m_j / M and added up over the workers. By linearity that is
right for each term of a loss on its own: several losses, several backwards before a step, and a penalty on the weights,
which all workers compute alike and whose factors m_j / M add up to 1. A worker without images contributes zeros,
whatever its placeholder gave (0 · NaN would be NaN).

Nothing is wrapped. Torch accumulates the gradient of each parameter in one node of the graph, ``AccumulateGrad``. A
hook before that node takes the gradient out of the graph, and puts it, multiplied, into a bucket. Buckets are summed
over the workers while the backward is still running, in one fixed order on all workers, as those of
DistributedDataParallel are (Li et al. 2020). When the backward has ended, a callback of the autograd engine waits for
the sums and adds them to ``parameter.grad``. What was there before is equal on all workers already, and stays out of
the sum. ``torch.autograd.grad`` never reaches these nodes, so it gives what this worker's images give.

If only some workers have a gradient for a parameter, that of the others is zero. If none has, its ``grad`` stays as it
was. So layers that are left out, frozen or unfrozen train as they would on one worker.

A loop that adds up several backwards before a step may sum once, after the last of them. Until then its gradients stay
in the buckets, multiplied by the share that each had.
"""

from __future__ import annotations

import gc
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from raytrain.errors import UsageError
from raytrain.training.protocols import Worker

_NOT_A_NUMBER, _INFINITE = 2e299, 1e300
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule"}  # of torch
_FIRST_BYTES, _BYTES = 1 << 20, 25 << 20  # size of the first bucket, which is sent early, and of the others
HOOK_NOTE = (
    "a hook of a tensor gets the gradient of the mean over one worker's images, as in DistributedDataParallel, so what "
    "it changes depends on the number of workers; change parameter.grad after backward(), or use "
    "register_post_accumulate_grad_hook, which gets the gradient of the global batch"
)


class ExactGradients:
    """Sums the gradients of all parameters that it follows over the workers, each time that a backward ends.

    Args:
        share: returns m_j / M for the images whose loss is being differentiated, as a number or as a tensor () on the
            device; exactly 0.0 on a worker without images.
        finished: called after each backward, when all gradients are there.
        report: gets a note for whoever watches the run.
    """

    def __init__(
        self,
        worker: Worker,
        share: Callable[[], Tensor | float],
        finished: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self._world_size = worker.world_size
        # In a backward, collectives of batch norm come in another order on each worker.
        self._group = own_group(worker.device) if worker.world_size > 1 else None
        self._share, self._finished, self._report = share, finished, report
        self._is_first = True  # no backward has begun yet
        self._factor: Tensor | float = 1.0  # the share, in the backward that is running
        self._is_running = False
        self._is_deferred = False  # gradients stay in the buckets after a backward
        self._has_deferred = False  # some are there
        self._nodes: dict[Tensor, Any] = {}  # AccumulateGrad of each parameter; hooks live as long as their node
        self._parameters: list[Tensor] = []  # those in the buckets
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._num_sent = 0
        self._held_hooks: list[tuple[Tensor, dict[int, Any], dict[int, Any]]] = []

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Make the gradients of ``parameters`` exact from now on; also of those that are frozen at the moment."""
        if len(parameters) == len(self._nodes) and all(each in self._nodes for each in parameters):
            return
        self._nodes = {each: self._nodes.get(each) or self._hooked(each) for each in parameters if _can_learn(each)}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In this context gradients stay on this worker, until the next backward after it or ``sum_deferred``."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def sum_deferred(self) -> None:
        """Sum over the workers what has been deferred. All workers call this, before a step of an optimizer."""
        if self._has_deferred:
            self._sum()

    def reset(self) -> None:
        """Forget a backward that raised an exception, which the loop may have caught."""
        if self._is_running:
            for bucket in self._buckets:
                bucket.discard()
        self._is_running = False
        self._give_back_hooks()

    def _hooked(self, parameter: Tensor) -> Any:
        requires_grad = parameter.requires_grad
        node = get_gradient_edge(parameter.requires_grad_(True)).node
        parameter.requires_grad_(requires_grad)
        node.register_prehook(partial(self._arrives, parameter))
        return node

    def _arrives(self, parameter: Tensor, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
        """Take the gradient that a backward has computed for ``parameter``; called by the autograd engine."""
        if not self._is_running:
            self._start()
        (gradient,) = gradients
        if self._world_size == 1:
            if self._factor == 1.0:
                return None
            return (gradient * self._factor if self._factor else torch.zeros_like(gradient),)
        _check_summable(parameter, gradient)
        bucket = self._bucket_of[parameter]
        if bucket.work is not None:  # a layer that a re-entrant checkpoint and the network around it share
            self._receive(bucket)
        bucket.add(parameter, gradient, self._factor)
        if bucket.is_complete and not self._is_deferred:
            self._send_complete()
        return (None,)

    def _start(self) -> None:
        """Begin with the first gradient of a backward: put those parameters into buckets that can get one now."""
        self._factor = self._share()
        if not isinstance(self._factor, Tensor) and self._factor:
            self._factor = torch.tensor(self._factor, dtype=torch.float64)  # multiplies twice as fast as a float
        self._num_sent = 0
        for bucket in self._buckets:
            bucket.arrived_now.clear()
        if self._world_size > 1:
            parameters = [each for each in self._nodes if each.requires_grad]
            if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
                self.sum_deferred()
                self._parameters = parameters
                self._buckets = [Bucket(each) for each in _divided(parameters[::-1])]  # the last layers' come first
                self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.parameters}
            self._hold_hooks()
            if self._is_first:
                check_not_wrapped(self._nodes)
        self._is_first = False
        self._is_running = True
        Variable._execution_engine.queue_callback(self._end)  # pyright: ignore[reportAttributeAccessIssue]

    def _send_complete(self) -> None:
        """Start to sum, in their order, the buckets that are complete."""
        while self._num_sent < len(self._buckets):
            bucket = self._buckets[self._num_sent]
            if not bucket.is_complete:
                return
            bucket.send(self._group)
            self._num_sent += 1

    @torch.no_grad()
    def _end(self) -> None:
        """Sum the buckets that are left, unless that is deferred; called when a backward has ended."""
        if self._is_deferred:
            self._has_deferred = True
        else:
            self._sum()
        self._is_running = False
        with_gradient = self._give_back_hooks()
        for parameter, hooks in () if self._is_deferred else with_gradient:
            for hook in hooks.values():
                hook(parameter)
        self._finished()

    def _sum(self) -> None:
        """Sum what has not been sent yet, and give all parameters their gradients."""
        for bucket in self._buckets:
            if bucket.work is None:
                bucket.send(self._group)
        for bucket in self._buckets:
            self._receive(bucket)
        self._has_deferred = False

    def _receive(self, bucket: Bucket) -> None:
        for parameter, gradient in bucket.receive():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)

    def _hold_hooks(self) -> None:
        """Take away the hooks that run after a gradient has been accumulated: they get that of the global batch."""
        for parameter in self._parameters:
            if parameter._backward_hooks:
                self._report(HOOK_NOTE)
            hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks  # pyright: ignore
            if hooks:
                self._held_hooks.append((parameter, hooks, dict(hooks)))
                hooks.clear()

    def _give_back_hooks(self) -> list[tuple[Tensor, dict[int, Any]]]:
        """Return the hooks that were taken away, of parameters that have a gradient; they are in their places again."""
        held, self._held_hooks = self._held_hooks, []
        for _, hooks, kept in held:
            hooks.update(kept)
        return [(parameter, kept) for parameter, _, kept in held if parameter.grad is not None]


class Bucket:
    """Parameters of one kind, whose gradients travel in one tensor."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.arrived: set[Tensor] = set()  # the parameters that got a gradient since the last sum
        self.arrived_now: set[Tensor] = set()  # and in this backward
        self.work: dist.Work | None = None
        self._flat: Tensor | None = None
        self._sizes = [each.numel() for each in parameters]
        self._views: dict[Tensor, Tensor] = {}

    @property
    def is_complete(self) -> bool:
        """Whether each parameter has got a gradient in this backward."""
        return len(self.arrived_now) == len(self.parameters)

    def discard(self) -> None:
        """Forget what has arrived, after waiting for the sum of it if that has begun."""
        if self.work is not None:
            self.work.wait()
        self._empty()

    def _empty(self) -> None:
        self.work, self._flat, self._views = None, None, {}
        self.arrived.clear()
        self.arrived_now.clear()

    def _renew(self) -> None:
        """Take new memory: the loop may still hold the gradients of the backward before, which are in the old one."""
        sizes = self._sizes
        # The gradients in a row, and for each of them whether there is one, as a number that is not 0.
        self._flat = self.parameters[0].new_empty(sum(sizes) + len(sizes))
        *rows, self._flags = self._flat.split([*sizes, len(sizes)])
        self._views = {each: _like(each, row) for each, row in zip(self.parameters, rows, strict=True)}

    def add(self, parameter: Tensor, gradient: Tensor, factor: Tensor | float) -> None:
        """Add ``factor`` times a ``gradient``; if the factor is 0.0, nothing of it.

        A backward calls this for each parameter, and disables gradients itself: ``no_grad`` would take time again.
        """
        if self._flat is None:
            self._renew()
        view = self._views[parameter]
        if parameter in self.arrived:
            view.add_(gradient * factor if isinstance(factor, Tensor) or factor else 0.0)
        elif isinstance(factor, Tensor) or factor:
            torch.mul(gradient, factor, out=view)
        else:
            view.zero_()
        self.arrived.add(parameter)
        self.arrived_now.add(parameter)

    @torch.no_grad()
    def send(self, group: Any) -> None:
        """Start to sum the gradients over the workers."""
        if self._flat is None:
            self._renew()
        if len(self.arrived) == len(self.parameters):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor([each in self.arrived for each in self.parameters]))
            for parameter in self.parameters:
                if parameter not in self.arrived:
                    self._views[parameter].zero_()
        assert self._flat is not None
        self.work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for the sums, and return each parameter that has a gradient on any worker, with its sum."""
        assert self.work is not None
        self.work.wait()
        has = [True] * len(self.parameters) if len(self.arrived) == len(self.parameters) else self._flags.tolist()
        summed = [(each, self._views[each]) for each, is_there in zip(self.parameters, has, strict=True) if is_there]
        self._empty()
        return summed


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


def digest_of_tensors(tensors: Iterable[Tensor]) -> list[float]:
    """Return four sums of each tensor: if one changes, so do they. The host waits for the device once."""
    digests = [_digest(tensor.detach()) for tensor in tensors]
    return torch.stack(digests).flatten().tolist() if digests else []


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


def _can_learn(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _check_summable(parameter: Tensor, gradient: Tensor) -> None:
    """Raise UsageError if the ``gradient`` of ``parameter`` cannot be summed over the workers."""
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"A parameter of the shape {tuple(parameter.shape)} gets a sparse gradient, which is not summed over the "
            "workers; make its layer with sparse=False and take an optimizer for that, or train on one worker."
        )
    if torch.is_grad_enabled():
        raise UsageError(
            "The loop calls loss.backward(create_graph=True), whose gradients are summed over the workers and cannot "
            "be differentiated again; take torch.autograd.grad(..., create_graph=True) for a penalty on gradients, or "
            "train on one worker."
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
