"""`raytrain.parallel`: exact data parallelism in any process group of torch, in place of DistributedDataParallel.

:mod:`raytrain.training.exact.exact_networks` describes what is done to the networks. It must know, before each
microbatch, which images come next. In a loop without a run nothing tells it that, so :class:`ParallelNetworks` infers
it from forwards:

- **When.** A forward begins a microbatch if it is the first one since the last backward, or if its network also began
  the last microbatch. Other networks, such as a head that gets features, belong to the microbatch that has begun.
- **How many images on this worker.** m_j is the number of rows of the first tensor that the network gets. It may be 0:
  then the worker takes part in all sums, and adds nothing to them. Batches of ``raytrain.ImageLoader`` are recognised
  by their images, and have their number (:mod:`raytrain.training.exact.images_of_tensors`), since a placeholder does
  not count.
- **How many images in all.** M comes from one small gather, which begins before the forward, and for which the backward
  waits. It must not begin in the backward, because the order of that and of batch norm's sums may differ between
  workers there. In evaluation mode nothing is sent before a backward, because one worker may evaluate alone.
- **Which images.** Dropout draws by (seed, step, sample). If samples have no numbers, step is the number of backwards,
  and sample is the index of a row in the global batch, to which the workers' rows are joined in the order of ranks.

Networks that one loss trains are given together, so that their gradients share buckets.
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
from raytrain.training.exact import images_of_tensors
from raytrain.training.exact.agreement import digest_of
from raytrain.training.exact.exact_networks import BatchNormMode, BeforeForward, ExactNetworks, make_layers_exact
from raytrain.training.exact.gradients import WRAPPERS, own_group, parameters_of
from raytrain.training.exact.images_of_tensors import LocalImages
from raytrain.training.protocols import Worker

First = TypeVar("First", bound=nn.Module)
Second = TypeVar("Second", bound=nn.Module)
Third = TypeVar("Third", bound=nn.Module)
_HOOK = (
    "a hook of a weight gets the gradient of the mean over one process's images, as in DistributedDataParallel, so it "
    "may multiply it and do nothing else; change parameter.grad after backward(), or use "
    "register_post_accumulate_grad_hook, which gets the gradient of the global batch"
)
_FORWARD, _BACKWARD = 0.0, 1.0  # the action with which a worker sends its number of images


class _Gather:
    """Gathers the ``row`` of each worker, float64 (1, K), on all workers; sends it at once, and waits in ``rows``."""

    def __init__(self, row: Tensor, worker: Worker, group: Any) -> None:
        self._rows, self._rank = row, worker.rank
        self._work: dist.Work | None = None
        if worker.world_size > 1:
            self._rows = row.new_empty(worker.world_size, row.shape[1])
            self._work = dist.all_gather_into_tensor(self._rows, row, group=group, async_op=True)

    def rows(self) -> Tensor:
        """Return the rows of all workers, (N, K). Raises UsageError if another worker has ended or does not come."""
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
    """The networks of one call of :func:`parallel`. Their forwards begin microbatches, by the rules above."""

    def __init__(self, worker: Worker, seed: int, batch_norm: BatchNormMode) -> None:
        super().__init__(worker, self._share)
        self._batch_norm: BatchNormMode = batch_norm
        # The gathers have a group of their own. In a shared one, a worker that is out of step could get another
        # collective's numbers, for which gloo ends the process.
        self._group = own_group(worker.device) if worker.world_size > 1 else None
        self._seed = seed
        self._num_backwards = 0  # the same on all workers, unlike the number of forwards
        self._images: LocalImages | None = None  # this worker's images of the microbatch
        self._drawn_for: tuple[Tensor | None, int] = None, -1  # the samples and the step for which dropout draws
        self._gather: _Gather | None = None  # of the workers' numbers of images in the microbatch
        self._unchecked: list[_Gather] = []  # gathers whose actions are not compared yet
        self._leader: nn.Module | None = None  # the network whose forward began the microbatch; None after a backward
        self._leader_was_training = False  # its mode in that forward
        self._sums_before_steps = False  # True once a hook sums deferred gradients before each step of an optimizer

    def join(self, network: nn.Module, *, sees_forwards: bool) -> None:
        """Add a ``network`` whose layers are exact, give it worker 0's weights, and follow its gradients at once.

        A run begins to follow gradients only with its first microbatch.
        """
        super().join(network, sees_forwards=sees_forwards)
        self.collect_layers()
        self.gradients.follow(self._parameters)

    def collect_layers(self) -> None:
        """Collect the layers and parameters, and make layers exact that the loop has put into a network since."""
        layers_before = self._layers
        super().collect_layers()
        for network, layers in self._layers.items():
            if layers_before and layers != layers_before.get(network):
                make_layers_exact(network, self._batch_norm, "raytrain.parallel")

    def before_forward(self, network: nn.Module, images: Tensor | None, num_rows: int) -> None:
        """Begin a microbatch, if this forward of ``network`` is the first one in it.

        ``images`` is the first tensor that the network gets, with ``num_rows`` rows.
        """
        # Three kinds of forwards begin nothing: those that checkpointing repeats in a backward; those within
        # torch.func.grad, which returns gradients of this process's images only, like torch.autograd.grad; and those of
        # an evaluation.
        is_repeated = torch._C._current_graph_task_id() != -1  # pyright: ignore
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
        is_evaluation = not network.training and not torch.is_grad_enabled()
        if is_repeated or is_transformed or is_evaluation:
            return
        # A network in training mode also begins a microbatch if one in evaluation mode, such as a teacher, came before
        # it: nothing was gathered for that one.
        trains_after_evaluation = network.training and not self._leader_was_training
        if self._leader is None or network is self._leader or trains_after_evaluation:
            self._leader, self._leader_was_training = network, network.training
            self._begin_images(network, images, num_rows)
        super().before_forward(network, images, num_rows)

    def _begin_images(self, network: nn.Module, images: Tensor | None, num_rows: int) -> None:
        """Begin a microbatch with ``images``, of ``num_rows`` rows, which ``network`` gets.

        Raises UsageError if more processes train than the networks were made parallel for, or if workers act
        differently.
        """
        if self._worker.world_size == 1:
            _check_group_came_first(1)
        self._images = images_of_tensors.known_or_expected(images, num_rows) or LocalImages(num_rows, num_rows)

        # If a backward will follow, gather the numbers of images. In evaluation mode, one worker may be alone.
        self._gather = None
        if network.training and torch.is_grad_enabled():
            if self._worker.world_size > 1 and any(parameter._backward_hooks for parameter in self._parameters):
                warnings.warn(_HOOK, stacklevel=2)
            self._gather = self._begin_gather(_FORWARD, self.trained.index(network))
            self._check_actions()
        samples = self._images.samples
        step = self._num_backwards if samples is None else self._images.step
        # An evaluation, which one worker may make alone, must not change which numbers dropout draws next.
        drawn_for = self._drawn_for
        self._drawn_for = (samples, step) if network.training else drawn_for
        self.begin(
            self._images.num_used,
            self._positions if samples is None else samples,
            step=step,
            seed=self._seed,
            scales_gradients=True,
            is_new=drawn_for[0] is not self._drawn_for[0] or drawn_for[1] != self._drawn_for[1],
        )

    def _positions(self) -> Tensor:
        """Return the index of each of this worker's rows in the global batch, int64 (rows,)."""
        assert self._images is not None
        counts = self._counts()
        return counts[: self._worker.rank].sum().long() + torch.arange(self._images.num_rows, device=counts.device)

    def _share(self) -> Tensor | float:
        """Return this worker's share of the images of the global batch, by which a backward multiplies its gradients.

        It is m / M for the m images of this worker and the M of all workers; 0.0 without images.

        Raises UsageError if no network was called before the backward.
        """
        if self._images is None:
            raise UsageError(
                "A backward reaches a network of raytrain.parallel that has not been called, so nothing says how many "
                "images it is of: call the network itself, model(images), not a layer or a method of it."
            )
        counts = self._counts()  # a worker without images takes part in this, too
        if self._is_checked:
            self._begin_gather(_BACKWARD)
        if not self._images.num_used:
            return 0.0
        total = counts.sum()
        return self._images.num_used / (float(total) if total.is_cpu else total)

    def _counts(self) -> Tensor:
        """Return the number of images of each worker in the microbatch, float64 (N,)."""
        self._gather = self._gather or self._begin_gather(_FORWARD)
        return self._gather.rows()[:, 0]

    def _begin_gather(self, action: float, network: int = 0) -> _Gather:
        """Begin to gather the workers' numbers of images, and what each is about to do, which should be the same.

        ``action`` is _FORWARD, of the ``network`` with this number, or _BACKWARD. Around some backwards, they are
        compared later, by ``_check_actions``.
        """
        assert self._images is not None
        row = torch.tensor([[self._images.num_used, action, network]], dtype=torch.float64)
        gather = _Gather(row.to(self._worker.device, non_blocking=True), self._worker, self._group)
        if self._is_checked:
            self._unchecked.append(gather)
        return gather

    @property
    def _is_checked(self) -> bool:
        """True around backward 1, 2, 4, 8, …, because most mistakes show early."""
        number = self._num_backwards + 1  # of the next backward
        return self._worker.world_size > 1 and number & (number - 1) == 0  # a power of 2

    def _check_actions(self) -> None:
        """Wait for the gathers that are not checked yet; raise UsageError unless all workers sent the same actions."""
        gathers, self._unchecked = self._unchecked, []
        for gather in gathers:
            _check_same_action(gather.rows()[:, 1:].tolist())

    def end_backward(self) -> None:
        """Count the backward, and update running statistics; the next forward begins a microbatch.

        Raises UsageError if the workers have acted differently.
        """
        super().end_backward()
        self._check_actions()
        self._num_backwards += 1
        self._leader = None

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this worker, until the next backward outside of it.

        Gradients that no backward has summed by then are summed by the next step of an optimizer of the networks.
        """
        # A hook of all optimizers, which goes with these networks. Most loops never need it.
        if not self._sums_before_steps:
            hook = register_optimizer_step_pre_hook(partial(_sum_deferred, weakref.ref(self)))
            weakref.finalize(self, hook.remove)
            self._sums_before_steps = True
        return self.gradients.deferred()


def _sum_deferred(reference: weakref.ref[ParallelNetworks], optimizer: Any, *_: object) -> None:
    """Sum the deferred gradients over the workers, before a step of an ``optimizer`` of one of the networks.

    It is called before each step of any optimizer, and refers to the networks weakly, so that it keeps none alive.
    """
    networks = reference()
    if networks is not None and any(id(tensor) in networks.parameter_ids for tensor in parameters_of(optimizer)):
        networks.gradients.sum_deferred()


# The functions for users.


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

    It takes the place of DistributedDataParallel in any loop: N processes then compute the same as one would with their
    batches joined, also if they have different numbers of images, or none. The loss is the mean over the images of a
    process. After ``loss.backward()``, each ``parameter.grad`` is the gradient of the mean over the images of all
    processes, and the same on all of them. Networks are changed in place and returned; nothing is wrapped, and the
    names of weights stay the same.

    Call it on every process, after ``init_process_group`` and before an optimizer steps. Then call the network as a
    whole, ``model(images)``. The number of images is the number of rows of the first tensor that it gets; a process
    without images calls it with 0 rows. Without a process group it trains on one process.

    Dropout draws the same numbers on any number of processes for the batches of ``raytrain.ImageLoader``, which have
    the numbers of their samples, and for those of any loader that gives each process a contiguous slice of the global
    batch, in the order of ranks. With a ``DistributedSampler``, which deals images out in turn, the numbers differ.
    Dropout within other layers, such as attention and ``nn.LSTM``, and in ``torch.nn.functional`` is not changed.

    Args:
        networks: the networks that one loss trains, such as a backbone and its head, on the device of this process.
        seed: of the random numbers of dropout.
        batch_norm: ``"sync"`` normalises with the statistics of all processes' images; ``"aggregate"`` with those of
            each process, and joins them for the running statistics, which needs no collective in a forward.

    Raises UsageError for what is no network, for one in DistributedDataParallel, of TorchScript or with lazy layers, if
    the process group does not exist yet or does not work on the networks' device, and if processes give networks of
    different shapes or other options.

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

    # Skip networks that are parallel already: a cell of a notebook may run again.
    new = [network for network in networks if _parallel_networks_of(network) is None]
    if new:
        tensors = [tensor for network in new for tensor in (*network.parameters(), *network.buffers())]
        worker = Worker.here(tensors[0].device if tensors else torch.device("cpu"))
        _check_group_came_first(worker.world_size)
        if worker.world_size > 1:
            _check_same_networks(worker, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors], seed, batch_norm)
        exact = ParallelNetworks(worker, seed, batch_norm)
        for network in new:
            make_layers_exact(network, batch_norm, "raytrain.parallel")
            exact.join(network, sees_forwards=True)
    return networks[0] if len(networks) == 1 else networks


def no_sync(network: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Return a context in which gradients stay on their process, like that of DistributedDataParallel.

    The gradients are added to those of the next backward outside of the context, which sends all of them once. A loop
    that accumulates gradients is also correct without it, but sends them each time. Until then, ``.grad`` lacks the
    gradients, so clip after that backward, and have the last backward of an epoch outside of the context. ``zero_grad``
    does not drop these gradients: skip a bad loss before its backward.

    Args:
        network: a network that :func:`parallel` got; the context also holds for those given with it.
        enabled: False for the last backward before a step, for which the context then does nothing.

    Raises UsageError for a network that :func:`parallel` has not got.

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
    """Return the group of networks to which :func:`parallel` has added ``network``; None if it has not."""
    for hook in network._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
        if isinstance(hook, BeforeForward) and isinstance(hook.networks, ParallelNetworks):
            return hook.networks
    return None


def _check_network(network: object) -> None:
    """Raise UsageError unless ``network`` can be made parallel."""
    if not isinstance(network, nn.Module):
        raise UsageError(
            f"raytrain.parallel got a {type(network).__name__} and takes networks (torch.nn.Module); single parameters "
            "can be given as nn.ParameterList([...])."
        )
    wrappers = [layer for layer in network.modules() if WRAPPERS & {base.__name__ for base in type(layer).__mro__}]
    if wrappers:
        raise UsageError(
            f"raytrain.parallel got a {type(wrappers[0]).__name__}, which sums gradients itself; give it the network "
            "inside of that (its .module), in its place."
        )
    if any(map(nn.parameter.is_lazy, (*network.parameters(), *network.buffers()))):
        raise UsageError(
            "raytrain.parallel got a network with lazy layers that have no shape yet; call it once with a batch before."
        )


def _check_group_came_first(world_size: int) -> None:
    """Raise UsageError if more processes train now than the ``world_size`` for which the networks were made parallel.

    More train if the process group was made after the networks, or never: then WORLD_SIZE, which torchrun sets, says
    how many processes there are.
    """
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
        digest = torch.tensor(digest_of(content)[:1], device=worker.device)
        digests = digest.new_empty(worker.world_size)
        dist.all_gather_into_tensor(digests, digest)
    except RuntimeError as error:
        raise UsageError(
            f"raytrain.parallel got a network on {worker.device.type}, and the process group ({dist.get_backend()}) "
            f"does not work there ({error!s:.100}): move the network to the device that it trains on first."
        ) from error
    digest_of_rank: list[int] = digests.tolist()
    if differing_ranks := [rank for rank, number in enumerate(digest_of_rank) if number != digest_of_rank[0]]:
        raise UsageError(
            f"raytrain.parallel got networks of other shapes or types, or other options, on worker "
            f"{differing_ranks[0]} than on worker 0; give it the same networks in the same order on every worker."
        )


def _check_same_action(actions: list[list[float]]) -> None:
    """Raise UsageError unless all workers call the same network, or all run a backward.

    ``actions`` has [action, number of the network] of each worker.
    """
    texts = [
        "runs a backward" if action == _BACKWARD else f"calls network {number + 1:.0f}" for action, number in actions
    ]
    if differing_ranks := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        rank = differing_ranks[0]
        raise UsageError(
            f"Worker 0 {texts[0]} in training mode while worker {rank} {texts[rank]}: every worker must call "
            "the networks of raytrain.parallel and loss.backward() equally often and in the same order; for what one "
            "worker does alone, put the network into evaluation mode, under torch.no_grad()."
        )
