"""`raytrain.parallel`: exact data parallelism in any process group of torch, in place of DistributedDataParallel.

:mod:`raytrain.training.exact_networks` says what is done to the networks. It must know, before each microbatch, which
images come next. In a loop of anybody's nothing says so, and :class:`ParallelNetworks` learns it from forwards:

- **When.** A forward begins a microbatch if it is the first one since the last backward, or if its network began the
  microbatch before. Other networks, such as a head that gets features, belong to the microbatch that has begun.
- **How many.** m_j is the number of rows of the first tensor that the network gets. That may be none: then a worker
  takes part in all sums, and adds nothing to them. Batches of ``raytrain.ImageLoader`` are recognised by their images,
  and say it themselves (:mod:`raytrain.training.local_images`), since a placeholder is an image that does not count.
- **How many in all.** M comes from one small gather, which begins before the forward. The backward waits for it, and
  nothing else begins there: in which order a backward waits for batch norm and for this may differ between workers.
  In evaluation mode nothing is sent before a backward, as one worker may measure alone.
- **Which.** Dropout draws by (seed, step, sample). Without names of samples, step is the number of backwards, and
  sample is the place of a row in the global batch, in which the workers' rows follow each other in the order of ranks.

Whoever trains networks that learn from each other gives them together: their gradients then share buckets.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os import environ
from typing import Any, TypeVar, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raytrain.errors import UsageError
from raytrain.training import local_images
from raytrain.training.agreement import digest_of
from raytrain.training.exact_networks import BatchNormMode, BeforeForward, ExactNetworks, make_layers_exact
from raytrain.training.gradients import WRAPPERS, own_group
from raytrain.training.local_images import LocalImages
from raytrain.training.optimisation import parameters_of
from raytrain.training.protocols import Worker

First = TypeVar("First", bound=nn.Module)
Second = TypeVar("Second", bound=nn.Module)
Third = TypeVar("Third", bound=nn.Module)
_FORWARD, _BACKWARD = 0.0, 1.0  # what a worker does when it sends its number of images


class _Gather:
    """The ``row`` of each worker, float64 (1, K), on all of them: sent at once, awaited when it is needed."""

    def __init__(self, row: Tensor, worker: Worker, group: Any) -> None:
        self._rows, self._rank = row, worker.rank
        self._work: dist.Work | None = None
        if worker.world_size > 1:
            self._rows = row.new_empty(worker.world_size, row.shape[1])
            self._work = dist.all_gather_into_tensor(self._rows, row, group=group, async_op=True)

    def rows(self) -> Tensor:
        """Return the rows of all workers, (N, K)."""
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise UsageError(
                f"Worker {self._rank} waits for the others in a network of raytrain.parallel, and one of them has "
                f"ended or does not come ({error!s:.200}): every worker needs the same number of batches, of which "
                "some may have no rows."
            ) from error
        return self._rows


class ParallelNetworks(ExactNetworks):
    """Networks of :func:`parallel`, which begin a microbatch by themselves. The module docstring has the rules."""

    def __init__(self, worker: Worker, seed: int, batch_norm: BatchNormMode) -> None:
        super().__init__(worker, self._share, partial(warnings.warn, stacklevel=2))
        self._batch_norm: BatchNormMode = batch_norm
        # A group of its own: gloo ends a process that gets a sum of another size if workers are out of step.
        self._group = own_group(worker.device) if worker.world_size > 1 else None
        self._seed = seed
        self._num_backwards = 0  # the same on all workers, unlike the number of forwards
        self._images: LocalImages | None = None  # of the microbatch
        self._gather: _Gather | None = None  # of the numbers of images in it, once it has begun
        self._unchecked: list[_Gather] = []  # those in which all workers must have done the same
        self._leader: tuple[nn.Module, bool] | None = None  # the network that began the microbatch, and its mode
        self._sums_before_steps = False

    def join(self, network: nn.Module, *, sees_forwards: bool) -> None:
        """Add a ``network`` whose layers are exact, and follow its gradients at once: nobody may have called it."""
        super().join(network, sees_forwards=sees_forwards)
        self.collect_layers()
        self.gradients.follow(self._parameters)

    def collect_layers(self) -> None:
        """Collect the layers and parameters, and make exact the layers that the loop has put into a network."""
        before = self._layers
        super().collect_layers()
        for network, layers in self._layers.items():
            if before and layers != before.get(network):
                make_layers_exact(network, self._batch_norm, "raytrain.parallel")

    def before_forward(self, network: nn.Module, images: Tensor | None, num_rows: int) -> None:
        """Begin a microbatch, if this forward of ``network`` is the first one of it."""
        is_repeated = torch._C._current_graph_task_id() != -1  # pyright: ignore  # gradient checkpointing, in a backward
        # Inside of torch.func.grad, which returns the gradients of this process's images, as torch.autograd.grad does.
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
        if is_repeated or is_transformed or not (network.training or torch.is_grad_enabled()):
            return
        if self._leader is None or network is self._leader[0] or (network.training and not self._leader[1]):
            self._leader = network, network.training
            self._begin_images(network, images, num_rows)
        super().before_forward(network, images, num_rows)

    def _begin_images(self, network: nn.Module, images: Tensor | None, num_rows: int) -> None:
        """Begin a microbatch with the images that ``network`` gets."""
        if self._worker.world_size == 1:
            _check_group_came_first(1)
        self._images = local_images.known_or_expected(images, num_rows) or LocalImages(num_rows, num_rows)

        # A backward follows, and will need the numbers of all workers. An evaluation may be on one worker only.
        self._gather = None
        if network.training and torch.is_grad_enabled():
            self._gather = self._begin_gather(_FORWARD, self.trained.index(network))
            self._check_actions()
        samples, step = self._images.samples, self._images.step
        self.begin(
            self._images.num_used,
            self._positions if samples is None else samples,
            step=self._num_backwards if samples is None else step,
            seed=self._seed,
            scales_gradients=True,
        )

    def _positions(self) -> Tensor:
        """Return the place of each of this worker's rows in the global batch, int64 (rows,)."""
        assert self._images is not None
        counts = self._counts()
        return counts[: self._worker.rank].sum().long() + torch.arange(self._images.num_rows, device=counts.device)

    def _share(self) -> Tensor | float:
        """Return m_j / M, by which a backward multiplies each gradient that reaches a parameter."""
        if self._images is None:
            raise UsageError(
                "A backward reaches a network of raytrain.parallel that has not been called, so nothing says how many "
                "images it is of: call the network itself, model(images), not a layer or a method of it."
            )
        counts = self._counts()  # in which a worker without images has a part, too
        if self._is_checked:
            self._begin_gather(_BACKWARD)
        if not self._images.num_used:
            return 0.0
        total = counts.sum()
        return self._images.num_used / (float(total) if total.is_cpu else total)

    def _counts(self) -> Tensor:
        """Return how many images each worker has in the microbatch, float64 (N,)."""
        self._gather = self._gather or self._begin_gather(_FORWARD)
        return self._gather.rows()[:, 0]

    def _begin_gather(self, action: float, network: int = 0) -> _Gather:
        """Begin to send this worker's number of images and its ``action``, which is the same on every worker."""
        assert self._images is not None
        row = torch.tensor([[self._images.num_used, action, network]], dtype=torch.float64)
        gather = _Gather(row.to(self._worker.device, non_blocking=True), self._worker, self._group)
        if self._is_checked:
            self._unchecked.append(gather)
        return gather

    @property
    def _is_checked(self) -> bool:
        """True around backward 1, 2, 4, 8, …: most mistakes show at once."""
        return self._worker.world_size > 1 and not self._num_backwards & (self._num_backwards + 1)

    def _check_actions(self) -> None:
        """Raise UsageError if not all workers did the same in the gathers that are to be checked. Waits for them."""
        gathers, self._unchecked = self._unchecked, []
        for gather in gathers:
            _check_same_action(gather.rows()[:, 1:].tolist())

    def end_backward(self) -> None:
        """Count the backward; the next forward begins a microbatch."""
        super().end_backward()
        self._check_actions()
        self._num_backwards += 1
        self._leader = None

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this worker. A step of an optimizer sums those that are left."""
        if not self._sums_before_steps:
            hook = register_optimizer_step_pre_hook(partial(_sum_deferred, weakref.ref(self)))
            weakref.finalize(self, hook.remove)
            self._sums_before_steps = True
        return self.gradients.deferred()


def _sum_deferred(reference: weakref.ref[ParallelNetworks], optimizer: Any, *_: object) -> None:
    """Sum the deferred gradients over the workers, before a step of an ``optimizer`` of one of the networks."""
    networks = reference()
    if networks is not None and any(id(each) in networks.parameter_ids for each in parameters_of(optimizer)):
        networks.gradients.sum_deferred()


# What users call.


@overload
def parallel(network: First, /, *, seed: int = 0, batch_norm: BatchNormMode = "sync") -> First: ...
@overload
def parallel(
    first: First, second: Second, /, *, seed: int = 0, batch_norm: BatchNormMode = "sync"
) -> tuple[First, Second]: ...
@overload
def parallel(
    first: First, second: Second, third: Third, /, *, seed: int = 0, batch_norm: BatchNormMode = "sync"
) -> tuple[First, Second, Third]: ...
@overload
def parallel(*networks: nn.Module, seed: int = 0, batch_norm: BatchNormMode = "sync") -> tuple[nn.Module, ...]: ...
def parallel(*networks: nn.Module, seed: int = 0, batch_norm: BatchNormMode = "sync") -> Any:
    """Make the gradients, the batch norm and the dropout of ``networks`` those of all workers of the process group.

    In place of DistributedDataParallel, in any loop: N processes then compute what one would with their batches put
    together, also if they have different numbers of images, or none. The loss is a mean over the images of a process.
    After ``loss.backward()`` each ``parameter.grad`` is that of the mean over the images of all of them, and the same
    everywhere. Networks are changed in place and returned; nothing is wrapped, and the names of weights stay.

    Call it on every process, after ``init_process_group`` and before an optimizer steps. Then call the network as a
    whole, ``model(images)``. The number of images is that of the rows of the first tensor that it gets; a process
    without images calls it with 0 rows. Without a process group it trains on one process.

    Dropout draws the same numbers on any number of processes for the batches of ``raytrain.ImageLoader``, which name
    their samples, and for those of any loader that gives each process a contiguous slice of the global batch, in the
    order of ranks. A ``DistributedSampler`` deals images out in turn, so there they are others.

    Args:
        networks: given together if one loss trains them, such as a backbone and its head; each is on its device.
        seed: of the random numbers of dropout.
        batch_norm: ``"sync"`` normalises with the statistics of all processes' images; ``"aggregate"`` with those of
            each process, and joins them for the running statistics, which needs no collective in a forward.

    Raises UsageError for a network inside of DistributedDataParallel, one of TorchScript, and processes whose networks
    differ in shape.

    Example::

        torch.distributed.init_process_group()
        model = raytrain.parallel(torchvision.models.resnet18().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    """
    for network in networks:
        _check_network(network)
    if not networks:
        raise UsageError("raytrain.parallel got no network; give it those that are trained, as in parallel(model).")
    if batch_norm not in get_args(BatchNormMode):
        raise UsageError(f'batch_norm of raytrain.parallel is {batch_norm!r}; it can be "sync" or "aggregate".')

    # A cell of a notebook may be run again, with networks that are parallel by now.
    new = [network for network in networks if _parallel_networks_of(network) is None]
    if new:
        tensors = [tensor for network in new for tensor in (*network.parameters(), *network.buffers())]
        worker = Worker.here(tensors[0].device if tensors else torch.device("cpu"))
        _check_group_came_first(worker.world_size)
        if worker.world_size > 1:
            _check_same_networks(worker, [(tuple(each.shape), each.dtype) for each in tensors], seed, batch_norm)
        exact = ParallelNetworks(worker, seed, batch_norm)
        for network in new:
            make_layers_exact(network, batch_norm, "raytrain.parallel")
            exact.join(network, sees_forwards=True)
    return networks[0] if len(networks) == 1 else networks


def no_sync(network: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Return a context in which backwards leave gradients on their process, as that of DistributedDataParallel does.

    They are added to those of the next backward outside of it, which sends them once. A loop that adds up gradients of
    several backwards is right without it. Until then ``.grad`` does not have them, so clip after that backward, and let
    the last one of an epoch be outside. ``zero_grad`` does not drop them: leave out a bad loss before its backward.

    Args:
        network: one of :func:`parallel`; what was given with it stays here, too.
        enabled: False for the last backward before a step.

    Example::

        for number, (images, labels) in enumerate(loader, start=1):
            with raytrain.no_sync(model, enabled=number % 4 != 0):
                (cross_entropy(model(images), labels) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    """
    networks = _parallel_networks_of(network)
    if networks is None:
        raise UsageError(
            f"raytrain.no_sync got a {type(network).__name__} that raytrain.parallel has not got before; in the loop "
            "of a run it is run.no_sync()."
        )
    return networks.deferred() if enabled else nullcontext()


def _parallel_networks_of(network: nn.Module) -> ParallelNetworks | None:
    """Return the networks that ``network`` was given to :func:`parallel` with; None if it was not."""
    for hook in network._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
        if isinstance(hook, BeforeForward) and isinstance(hook.networks, ParallelNetworks):
            return hook.networks
    return None


def _check_network(network: object) -> None:
    """Raise UsageError unless ``network`` is one that can be made parallel."""
    if not isinstance(network, nn.Module):
        raise UsageError(
            f"raytrain.parallel got a {type(network).__name__} and takes networks (torch.nn.Module); single parameters "
            "can be given as nn.ParameterList([...])."
        )
    wrappers = [layer for layer in network.modules() if WRAPPERS & {base.__name__ for base in type(layer).__mro__}]
    if wrappers:
        raise UsageError(
            f"raytrain.parallel got a {type(wrappers[0]).__name__}, which joins gradients itself; give it the network "
            "inside of that (its .module), in its place."
        )
    if any(map(nn.parameter.is_lazy, (*network.parameters(), *network.buffers()))):
        raise UsageError(
            "raytrain.parallel got a network with lazy layers that have no shape yet; call it once with a batch before."
        )


def _check_group_came_first(world_size: int) -> None:
    """Raise UsageError if there are more than ``world_size`` processes, with which the networks were made parallel."""
    has_group = dist.is_available() and dist.is_initialized()
    in_environment = environ.get("WORLD_SIZE") or "1"
    if not has_group and not in_environment.isdecimal():
        raise UsageError(
            f"WORLD_SIZE is {in_environment!r} in the environment, and is the number of processes that train together; "
            "set it as torchrun does, or leave it out to train on one process."
        )
    num_processes = dist.get_world_size() if has_group else int(in_environment)
    if num_processes > world_size:
        raise UsageError(
            f"This is one of {num_processes} processes, and would train alone: call "
            "torch.distributed.init_process_group() first, and raytrain.parallel after it."
        )


def _check_same_networks(worker: Worker, *content: object) -> None:
    """Raise UsageError, on all workers, unless all of them have the same ``content``."""
    try:
        own = torch.tensor(digest_of(content)[:1], device=worker.device)
        digests = own.new_empty(worker.world_size)
        dist.all_gather_into_tensor(digests, own)
    except RuntimeError as error:
        raise UsageError(
            f"raytrain.parallel got a network on {worker.device.type}, and the process group ({dist.get_backend()}) "
            f"does not work there ({error!s:.100}): move the network to the device that it trains on first."
        ) from error
    if others := [rank for rank, digest in enumerate(digests.tolist()) if digest != digests[0]]:
        raise UsageError(
            f"raytrain.parallel got networks of other shapes or types, or other options, on worker {others[0]} than on "
            "worker 0; give it the same networks in the same order on every worker."
        )


def _check_same_action(actions: list[list[float]]) -> None:
    """Raise UsageError unless all workers do the same: ``actions`` are (action, number of the network) of each."""
    texts = [
        "runs a backward" if action == _BACKWARD else f"calls network {number + 1:.0f}" for action, number in actions
    ]
    if others := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        raise UsageError(
            f"Worker 0 {texts[0]} in training mode while worker {others[0]} {texts[others[0]]}: every worker must call "
            "the networks of raytrain.parallel and loss.backward() equally often and in the same order; for what one "
            "worker does alone, put the network into evaluation mode, under torch.no_grad()."
        )
