"""Exact gradients: after ``loss.backward()`` each ``parameter.grad`` is that of the whole global batch.

A loop computes the mean loss of this worker's images, as it would on one GPU. With m_j images on worker j and M images
in the global batch, the loss of the global batch is the sum of (m_j / M) · mean_j over the workers. So each gradient
that arrives at a parameter during a backward is multiplied by m_j / M and added up over the workers. By linearity, that
is correct for each term of a loss: for several losses, for several backwards before a step, and for a penalty on the
weights, which all workers compute alike and whose factors m_j / M add up to 1. A worker without images contributes
zeros, whatever the gradients of its placeholder are (0 · NaN would be NaN).

Nothing is wrapped. torch accumulates the gradient of each parameter in one node of the graph, ``AccumulateGrad``. A
hook before that node takes the gradient out of the graph, multiplies it, and puts it into a bucket. Buckets are summed
over the workers while the backward is still running, in the same order on all workers, as in DistributedDataParallel
(Li et al. 2020), because all workers must take part in the same collective. When the backward has ended, a callback of
the autograd engine waits for the sums and adds them to ``parameter.grad``. The value that ``grad`` had before is equal
on all workers already, and is not summed again. ``torch.autograd.grad`` does not use these nodes, so it returns the
gradient of this worker's images.

If only some workers have a gradient for a parameter, that of the others counts as zero. If none has one, its ``grad``
does not change. So layers that are left out, frozen or unfrozen train as on one worker.

A loop that accumulates several backwards before a step may sum once, after the last of them. Until then its gradients
stay in the buckets, each multiplied by its share.

On slow networks, buckets of float32 may be sent as bfloat16 (:mod:`raytrain.training.exact.bfloat16_sum`).
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from raytrain.errors import UsageError
from raytrain.training.exact.bfloat16_sum import Bfloat16Sum
from raytrain.training.protocols import Worker

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule"}  # of torch
_FIRST_BYTES, _BYTES = 1 << 20, 25 << 20  # size of the first bucket, which is sent early, and of the others
_SMALL = 1 << 15  # numbers in a gradient; with fewer, calls of torch take longer than the arithmetic


class _HeldHooks(NamedTuple):
    """A user's hooks for the accumulated gradient of ``parameter``, which are taken away during a backward."""

    parameter: Tensor
    registry: dict[int, Any]  # the parameter's own dictionary of hooks, empty meanwhile
    hooks: dict[int, Any]  # what it had


class ExactGradients:
    """Sums the gradients of all followed parameters over the workers during each backward.

    Args:
        share: returns m_j / M for the images whose loss is being differentiated, as a number or as a tensor () on the
            device; exactly 0.0 on a worker without images.
        finished: called after each backward, when all gradients are in place, or in the buckets if they are deferred.
        in_bfloat16: send gradients in float32 as bfloat16.

    Example::

        gradients = ExactGradients(worker, share=lambda: 5 / 8, finished=lambda: None)
        gradients.follow(list(model.parameters()))
        loss.backward()  # of the mean over 5 of 8 images; afterwards .grad is that of the mean over all 8
    """

    _last_taken: ClassVar[tuple[int, int]] = 0, 0  # ids of the last taker and parameter in a backward that is running

    def __init__(
        self,
        worker: Worker,
        share: Callable[[], Tensor | float],
        finished: Callable[[], None],
        *,
        in_bfloat16: bool = False,
    ) -> None:
        self._world_size = worker.world_size
        # Sums have process groups of their own, because their order relative to batch norm's collectives may differ
        # between workers. On a CPU, the two halves of a sum in bfloat16 have one each, for the same reason.
        num_groups = 0
        if worker.world_size > 1:
            num_groups = 2 if in_bfloat16 and worker.device.type == "cpu" else 1
        self._groups = [own_group(worker.device) for _ in range(num_groups)]
        self._in_bfloat16 = in_bfloat16
        self._share, self._finished = share, finished
        self._is_first = True  # no backward has begun yet
        self._factor: Tensor | float = 1.0  # the share, in the backward that is running
        self._is_running = False  # True within a backward, and after one that has raised an exception
        # A weak reference to the callback of the last backward. Only the engine holds the callback, until that backward
        # ends or fails: a dead reference tells a failed backward from a running one.
        self._callback: Callable[[], object] = lambda: None
        self._is_deferred = False  # gradients stay in the buckets after a backward
        self._has_deferred = False  # the buckets have gradients of earlier backwards
        # Dicts are keyed by the id of a parameter, because hashing a tensor takes 0.3 µs.
        self._followed: dict[int, Tensor] = {}
        self._nodes: dict[int, Any] = {}  # the AccumulateGrad of each parameter; kept, because its hook ends with it
        self._parameters: list[Tensor] = []  # that are in the buckets
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._num_sent = 0  # buckets that were sent in this backward
        self._half_done = deque[Bfloat16Sum]()  # sums whose second half has not begun
        self._held_hooks: list[_HeldHooks] = []

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Make the gradients of ``parameters`` exact from now on, and of no others.

        Frozen ones are included, because the loop may unfreeze them later. A call with the same parameters as before is
        cheap.
        """
        followed = dict(zip(map(id, parameters), parameters, strict=True))
        # If a network has moved to another device or type, its parameters are the same objects with new nodes. One
        # parameter that was followed before, and has a node now, shows it for all of them.
        sample = next((tensor for key, tensor in followed.items() if tensor.requires_grad and key in self._nodes), None)
        if sample is not None and get_gradient_edge(sample).node is not self._nodes[id(sample)]:
            self._nodes, self._parameters = {}, []
        if self._nodes and followed.keys() == self._followed.keys():
            return

        # Register a hook at the node of each new parameter.
        nodes: dict[int, Any] = {}
        for key, parameter in followed.items():
            if key in self._nodes:
                nodes[key] = self._nodes[key]
            elif parameter.is_floating_point() or parameter.is_complex():
                # A frozen parameter has no node: make one now, with a hook, because the loop may unfreeze it later.
                requires_grad = parameter.requires_grad
                nodes[key] = get_gradient_edge(parameter.requires_grad_(True)).node
                parameter.requires_grad_(requires_grad)
                nodes[key].register_prehook(partial(self._take_gradient, parameter))
        self._followed, self._nodes = followed, nodes

    def _take_gradient(
        self, parameter: Tensor, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """Take the gradient that a backward has computed for ``parameter``; called by the autograd engine.

        Returns a tuple with the gradient that the engine should accumulate instead: (None,) for none, because the
        bucket has it. Returning None leaves the gradient unchanged.
        """
        # The first gradient begins a backward. If the last one has failed, it still counts as running, but the engine
        # has dropped its callback.
        if not self._is_running or self._callback() is None:
            self._begin_backward()
        (gradient,) = gradients
        if gradient is None:  # a function without a gradient, such as one that stops it, lies behind the parameter
            self._check_not_taken(parameter)
            return None
        # A single worker sums nothing, but a microbatch still has its factor, and a placeholder the factor 0.
        if self._world_size == 1:
            if self._factor == 1.0:
                return None
            if not self._factor:
                return (torch.zeros_like(gradient),)
            # The factor is float64, and so would be its product with the gradient of a parameter without dimensions.
            return ((gradient * self._factor).to(gradient.dtype),)
        _check_summable(parameter, gradient)
        bucket = self._bucket_of[id(parameter)]
        # A complete bucket may be sent already, and then get another gradient: a layer may be used both within a
        # re-entrant checkpoint, whose backward ends early, and outside of it. Take the sum first.
        if bucket.work is not None:
            self._receive(bucket)
        bucket.add(parameter, gradient, self._factor)
        ExactGradients._last_taken = id(self), id(parameter)
        # Send complete buckets, in an order that is the same on all workers: each waits for those before it.
        if bucket.is_complete and not self._is_deferred:
            while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].is_complete:
                self._send(self._buckets[self._num_sent])
                self._num_sent += 1
        return (None,)

    def _check_not_taken(self, parameter: Tensor) -> None:
        """Raise UsageError if ``parameter`` has no gradient because other :class:`ExactGradients` have taken it."""
        taker_id, taken_id = ExactGradients._last_taken
        if taker_id != id(self) and taken_id == id(parameter):
            raise UsageError(
                f"A parameter of the shape {tuple(parameter.shape)} is in networks of two calls of raytrain.parallel, "
                "and each of them would sum its gradient; give both networks to one call, raytrain.parallel(first, "
                "second), or only the outer one if it contains the other."
            )

    def _send(self, bucket: Bucket) -> None:
        """Start to sum a ``bucket`` over the workers. Go on with earlier sums in bfloat16, which take two steps."""
        bucket.send(self._groups, self._world_size, in_bfloat16=self._in_bfloat16)
        # Such a sum first sends parts to the workers that add them up, and then their results. These second steps begin
        # in the order of the first ones, which all workers share.
        if isinstance(bucket.work, Bfloat16Sum):
            self._half_done.append(bucket.work)
        while self._half_done and self._half_done[0].is_sent():
            self._half_done.popleft().add_up()

    def _begin_backward(self) -> None:
        """Prepare the buckets at the first gradient of a backward, and have the engine call ``_end_backward`` later.

        Raises UsageError, in the first backward, if one of torch's wrappers sums these gradients, too.
        """
        self.reset()  # drops the gradients of a backward that failed
        self._factor = self._share()
        if not isinstance(self._factor, Tensor) and self._factor:
            self._factor = torch.tensor(self._factor, dtype=torch.float64)  # multiplying by it is twice as fast
        self._num_sent = 0
        for bucket in self._buckets:
            bucket.arrived_now.clear()
        if self._world_size > 1:
            # Buckets have the parameters that can get a gradient. If the loop has frozen or unfrozen some, make buckets
            # anew, after what is deferred in the old ones is summed.
            parameters = [
                tensor for key, tensor in self._followed.items() if key in self._nodes and tensor.requires_grad
            ]
            if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
                self.sum_deferred()
                self._parameters = parameters
                self._buckets = list(_split_into_buckets(parameters[::-1]))  # a backward begins with the last layers
                self._bucket_of = {id(tensor): bucket for bucket in self._buckets for tensor in bucket.parameters}
            # The engine would call users' hooks for accumulated gradients before the sums are there. So take the hooks
            # away during the backward, and call them after it, with the gradient of the global batch.
            for parameter in self._parameters:
                hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks  # pyright: ignore
                if hooks:
                    self._held_hooks.append(_HeldHooks(parameter, registry=hooks, hooks=dict(hooks)))
                    hooks.clear()
            if self._is_first:
                check_not_wrapped(self._followed.values())
        self._is_first = False
        self._is_running = True
        callback = partial(self._end_backward)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Sum the buckets that are left, and call users' hooks; called by the engine at the end of a backward.

        If sums are deferred, gradients stay in the buckets, and the hooks are not called.
        """
        if self._is_deferred:
            self._has_deferred = True
            for bucket in self._buckets:
                bucket.write_small()  # with this backward's share, since the next one may have another
        else:
            self._sum()
        self._is_running = False
        ExactGradients._last_taken = 0, 0
        # Give all hooks back before the first one is called: if it raises an exception, none is lost.
        held_hooks = [held for held in self._give_back_hooks() if held.parameter.grad is not None]
        if not self._is_deferred:
            for held in held_hooks:
                for hook in held.hooks.values():
                    hook(held.parameter)
        self._finished()

    def _sum(self) -> None:
        """Send the buckets that have not been sent yet, and add all sums to the parameters' gradients."""
        for bucket in self._buckets:
            if bucket.work is None:
                self._send(bucket)
        for bucket in self._buckets:
            self._receive(bucket)
        self._has_deferred = False

    def _receive(self, bucket: Bucket) -> None:
        """Wait for the sum of a ``bucket``, and add it to the gradients of its parameters."""
        # Begin the second halves of all sums before waiting for one, in the order that all workers share.
        while self._half_done:
            self._half_done.popleft().add_up()
        for parameter, gradient in bucket.receive():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)

    def _give_back_hooks(self) -> list[_HeldHooks]:
        """Give users' hooks back to the parameters from which they were taken away, and return them."""
        held_hooks, self._held_hooks = self._held_hooks, []
        for held in held_hooks:
            held.registry.update(held.hooks)
        return held_hooks

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep the gradients of backwards in this context in the buckets of this worker.

        They are summed by the next backward after the context, or by :meth:`sum_deferred`.
        """
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def sum_deferred(self) -> None:
        """Sum the deferred gradients over the workers, if there are any.

        All workers call this before a step of an optimizer, and have deferred the same backwards.
        """
        if self._has_deferred:
            self._sum()

    def reset(self) -> None:
        """Drop the gradients of a backward that has raised an exception, which the loop may have caught.

        Deferred gradients of earlier backwards are then dropped, too. After a backward that has ended, nothing changes.
        """
        if self._is_running:
            for bucket in self._buckets:
                bucket.discard()
        self._half_done.clear()
        self._is_running = False
        self._give_back_hooks()


class Bucket:
    """Parameters of one type and device, whose gradients are sent in one tensor.

    After the sum, each parameter's gradient is a view of that tensor. On a CPU, new memory costs a page fault for each
    4 KiB, which takes as long as all computations here. So the tensor is kept and reused, unless the loop still has a
    gradient of the backward before. On a GPU, torch itself reuses memory.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        # Small gradients come first in the tensor, so that they can be written together, in a quarter of the time.
        self.parameters = sorted(parameters, key=lambda parameter: parameter.numel() >= _SMALL)
        self.arrived: set[int] = set()  # ids of the parameters that got a gradient since the last sum
        self.arrived_now: set[int] = set()  # ids of the parameters that got one in this backward
        self.work: dist.Work | Bfloat16Sum | None = None  # the sum, once it has begun
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._num_small = sum(size < _SMALL for size in self._sizes)
        self._flat: Tensor | None = None  # all gradients in a row, and then a flag for each
        self._is_ready = False  # True once the tensor can take the gradients of the next sum
        self._views: dict[int, Tensor] = {}  # the part of the tensor for each parameter's gradient, by the id
        self._flags = torch.empty(0)  # the last part of the tensor: 1 for each parameter that has a gradient, or 0
        self._small: list[tuple[Tensor, Tensor]] = []  # small gradients that are not written yet, each after its view
        self._small_factor: Tensor | float = 1.0  # by which these are multiplied

    @property
    def is_complete(self) -> bool:
        """True once each parameter has got a gradient in this backward."""
        return len(self.arrived_now) == len(self.parameters)

    def add(self, parameter: Tensor, gradient: Tensor, factor: Tensor | float) -> None:
        """Add ``factor`` times a ``gradient``; add zeros if the factor is 0.0, even if the gradient is NaN.

        A backward calls this for each parameter, without recording a graph, so ``no_grad`` is not needed.
        """
        if not self._is_ready:
            self._make_ready()
        key = id(parameter)
        view = self._views[key]
        is_used = isinstance(factor, Tensor) or factor != 0.0  # a worker without images has the number 0.0, no tensor
        if key in self.arrived:
            self.write_small()
            view.add_(gradient * factor if is_used else 0.0)
        elif not is_used:
            view.zero_()
        elif gradient.numel() < _SMALL:
            self._small.append((view, gradient))
            self._small_factor = factor
        else:
            torch.mul(gradient, factor, out=view)
        self.arrived.add(key)
        self.arrived_now.add(key)

    def write_small(self) -> None:
        """Write the small gradients of this backward that are not written yet into the tensor, times their factor."""
        if not self._small:
            return
        views, gradients = map(list, zip(*self._small, strict=True))
        torch._foreach_copy_(views, gradients)  # pyright: ignore[reportPrivateImportUsage]
        # If all are there, they fill the beginning of the tensor, which one multiplication serves.
        if len(views) == self._num_small:
            assert self._flat is not None
            views = [self._flat[: sum(self._sizes[: self._num_small])]]
        for view in views:
            view.mul_(self._small_factor)
        self._small = []

    @torch.no_grad()
    def send(self, groups: Sequence[Any], world_size: int, *, in_bfloat16: bool) -> None:
        """Start to sum the gradients over the workers in ``groups``.

        With ``in_bfloat16``, gradients in float32 are rounded to bfloat16 before they are sent. Parameters without a
        gradient on this worker take part with zeros.
        """
        if not self._is_ready:
            self._make_ready()
        self.write_small()
        if len(self.arrived) == len(self.parameters):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor([id(parameter) in self.arrived for parameter in self.parameters]))
            for key in self._views.keys() - self.arrived:
                self._views[key].zero_()
        assert self._flat is not None
        if in_bfloat16 and self._flat.dtype == torch.float32:
            self.work = Bfloat16Sum(self._flat, (groups[0], groups[-1]), world_size)
        else:
            self.work = dist.all_reduce(self._flat, group=groups[0], async_op=True)

    def receive(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for the sums, and return each parameter that has a gradient on any worker, with its sum."""
        assert self.work is not None
        self.work.wait()
        summed = list(zip(self.parameters, self._views.values(), strict=True))
        # If a parameter got no gradient here, the summed flags say whether another worker has one. Reading them makes
        # the host wait for the device.
        if len(self.arrived) < len(self.parameters):
            summed = [pair for pair, flag in zip(summed, self._flags.tolist(), strict=True) if flag]
        self._empty()
        return summed

    def discard(self) -> None:
        """Drop the gradients that have arrived; first wait for their sum, if it has begun, as it uses their memory."""
        if self.work is not None:
            self.work.wait()
        self._empty()

    def _make_ready(self) -> None:
        """Divide the bucket's tensor into a view for each parameter's gradient, and the flags.

        The tensor is made if there is none, or if the loop still holds gradients, of the last backward, that are views
        of it.
        """
        sizes = self._sizes
        if self._flat is None or _is_shared(self._flat):
            self._flat = self.parameters[0].new_empty(sum(sizes) + len(sizes))
        *rows, self._flags = self._flat.split([*sizes, len(sizes)])
        for parameter, row in zip(self.parameters, rows, strict=True):
            # A gradient has the memory layout of its parameter, if that is dense: optimizers are fastest then.
            is_channels_last = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
            if parameter.ndim == 1:
                view = row
            elif parameter.is_contiguous() or is_channels_last:
                view = row.as_strided(parameter.shape, parameter.stride())
            else:
                view = row.view(parameter.shape)
            self._views[id(parameter)] = view
        self._is_ready = True

    def _empty(self) -> None:
        """Forget the gradients, which have been summed or are dropped; on a CPU, keep the tensor for the next ones."""
        self.work, self._is_ready, self._small = None, False, []
        # Views and flags would count as users of the tensor's memory, like gradients that the loop holds.
        self._views, self._flags = {}, torch.empty(0)
        if self._flat is not None and not self._flat.is_cpu:
            self._flat = None
        self.arrived.clear()
        self.arrived_now.clear()


def _is_shared(flat: Tensor) -> bool:
    """Return whether another object uses the memory of ``flat``; True if this version of torch cannot tell.

    Such objects are the gradient of a parameter, a view, an array of NumPy, or a tensor that a graph has saved.
    """
    use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
    # Two users are known: the tensor itself, and what untyped_storage() has returned.
    return use_count is None or use_count(flat.untyped_storage()._cdata) > 2


def _split_into_buckets(parameters: Sequence[Tensor]) -> Iterator[Bucket]:
    """Yield the ``parameters``, in their order, in buckets of one type and device each; the first bucket is small."""
    bucket: list[Tensor] = []
    num_bytes, limit_bytes = 0, _FIRST_BYTES
    for parameter in parameters:
        is_of_other_kind = bucket and (parameter.dtype, parameter.device) != (bucket[0].dtype, bucket[0].device)
        if is_of_other_kind or num_bytes >= limit_bytes:
            yield Bucket(bucket)
            bucket, num_bytes, limit_bytes = [], 0, _BYTES
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield Bucket(bucket)


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


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters in the groups of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_not_wrapped(parameters: Iterable[Tensor]) -> None:
    """Raise UsageError if one of torch's wrappers, which sum gradients themselves, holds any of ``parameters``.

    A parameter does not know its wrapper, so all objects of this process are searched, which takes 0.1 s.
    """
    ids = set(map(id, parameters))
    objects = gc.get_objects()
    # Objects are many and their types few, so find the wrappers' types first. Usually there is none.
    kinds = {kind for kind in set(map(type, objects)) if WRAPPERS & {base.__name__ for base in kind.__mro__}}
    wrappers = [candidate for candidate in objects if type(candidate) in kinds] if kinds else []
    # Keep none of the others: autograd's hook runs this, and while a list has the tuple of the hook's arguments, torch
    # cannot put the hook's result into it, and silently accumulates the gradient of this worker's images instead. The
    # list would live on if another thread reads this stack, as that of report_long_waits does.
    objects.clear()
    for wrapper in wrappers:
        if not ids.isdisjoint(map(id, wrapper.parameters())):
            raise UsageError(
                f"The loop puts a network of run.prepare or raytrain.parallel, or a layer of one, into a "
                f"{type(wrapper).__name__}, which would sum gradients a second time; leave that out and call the "
                "network itself: it trains on any number of workers."
            )


def own_group(device: torch.device) -> Any:
    """Return a new process group of all workers, for collectives that other ones may overtake. All workers call this.

    It has the limit of time of the default group.
    """
    default: Any = dist.group.WORLD
    return dist.new_group(timeout=default._get_backend(device).options._timeout)
