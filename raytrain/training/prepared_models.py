"""The networks that a loop has prepared: changes them in place, evaluates them, and checks that workers have the same.

``run.prepare(network)`` changes a network so that N workers compute with it what one would:

1. Its batch norm and dropout layers get other classes (:mod:`raytrain.training.exact.exact_networks`).
2. It is moved to the device, gets the weights of a checkpoint, and then those of worker 0.
3. Options that change how it computes are applied: gradient checkpointing, mixed precision, compilation.

From then on :meth:`PreparedModels.begin_microbatch` tells its layers, before each microbatch, which samples come next
and how many of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.errors import UsageError, some_of
from raytrain.training.batches.batch import Batch
from raytrain.training.checkpoint_state import MEASURED, CheckpointState, StateDict
from raytrain.training.exact import batchnorm, dropout
from raytrain.training.exact.agreement import digest_of_tensors, find_differing
from raytrain.training.exact.exact_networks import ExactNetworks, make_layers_exact
from raytrain.training.exact.gradients import parameters_of
from raytrain.training.networks.compiled import check_recordable, compile_network, records_graphs
from raytrain.training.networks.mixed_precision import mixed_precision, prepare_for_autocast
from raytrain.training.networks.model import initialise_lazy_layers
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.protocols import Worker

_CAUSE_IN_BUFFERS = (
    "a buffer is filled by a layer or the loop from a worker's own images; average or gather over the workers what "
    "goes into it, with run.gather, or with torch.distributed in a layer"
)
_CAUSE_IN_WEIGHTS = (
    "they were changed by a worker's own images or random numbers, as by gradients of torch.autograd.grad or by a "
    "learning rate that follows its own loss; compute what changes them from all workers' images, with run.total, "
    "run.mean or run.gather"
)
_SEQUENCES = (nn.Sequential, nn.ModuleList)
_FINITE_BUFFERS = ("running_mean", "running_var")  # names of buffers; others, such as attention masks, may be infinite


def shapes_of(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters and buffers of ``model``, except lazy ones, which have no shape yet."""
    tensors = (*model.parameters(), *model.buffers())
    return [tuple(tensor.shape) for tensor in tensors if not nn.parameter.is_lazy(tensor)]


def apply_options(model: nn.Module, config: TrainConfig) -> None:
    """Apply gradient checkpointing, mixed precision and compilation to ``model``, in place, as the options ask.

    Its class stays the same, and copies of it compute the same way with their own weights. Raises UsageError for
    gradient checkpointing of a network that has no blocks.
    """
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
        batchnorm.count_once(model)  # a batch whose forward is repeated in the backward
    prepare_for_autocast(model, config.precision)
    if config.compile_mode is not None:
        compile_network(model, config.compile_mode)


def checkpoint_gradients(model: nn.Module) -> nn.Module:
    """Let ``model`` keep only the inputs of its blocks, and compute their activations again during the backward.

    Networks of timm name their blocks themselves. In others, a block is a member of an ``nn.Sequential`` or
    ``nn.ModuleList`` that has layers of its own. The network is trained as without this: our dropout draws the same
    numbers again, and our batch norm counts a batch once, after ``batchnorm.count_once``. Changes the network in place,
    and returns it. Raises UsageError if it has no blocks.
    """
    enable: Callable[[], Any] | None = getattr(model, "set_grad_checkpointing", None)
    if enable is not None:
        try:
            enable()
        except AssertionError as error:  # raised by timm's networks that have no blocks
            raise UsageError(f"--gradient-checkpointing: the network refuses it ({error}); omit it.") from None
        return model
    blocks = list(_blocks(model))
    if not blocks:
        raise UsageError(
            "--gradient-checkpointing computes blocks of layers again, and the network has none in a sequence; omit "
            "it, or use --accumulate to need less memory."
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks in ``module``: the outermost members of its sequences that have layers of their own."""
    for child in module.children():
        is_block = isinstance(module, _SEQUENCES) and not isinstance(child, _SEQUENCES) and any(child.children())
        yield from [child] if is_block else _blocks(child)


class PreparedModels(ExactNetworks):
    """All networks that a loop has prepared (``trained``), on this worker's device.

    Args:
        share: returns m_j / M, see :class:`~raytrain.training.exact.gradients.ExactGradients`.
    """

    def __init__(
        self, config: ResolvedConfig, worker: Worker, state: CheckpointState, share: Callable[[], Tensor | float]
    ) -> None:
        super().__init__(worker, share, gradients_in_bfloat16=config.gradient_dtype == "bfloat16")
        self.named: dict[str, nn.Module] = {}  # the networks and averages of weights, by their names in checkpoints
        self.built_by_options: set[str] = set()  # networks that run.build_model has made, as the text of their layers
        self._config = config
        self._state = state
        self._average: WeightAverage | None = None  # of the first network's weights, if the loop prepares one
        # The networks that the last evaluation called, by name, with the weights that they had, or None if not kept.
        self._called: dict[str, StateDict | None] = {}

    def add(self, model: nn.Module) -> nn.Module:
        """Prepare ``model`` in place, as described at the top of this module, and return it.

        Raises UsageError if the network, or an option for it, does not work on several workers, or if the checkpoint
        has another one.
        """
        # Its batch norm and dropout become those of all workers. Layers without running statistics cannot be frozen, so
        # they are synchronised.
        is_built_by_options = str(model) in self.built_by_options
        initialise_lazy_layers(model, self._config.channels, self._config.full_image_size)
        is_frozen = self._config.batch_norm == "frozen"
        if is_frozen:
            batchnorm.freeze(model)
        make_layers_exact(model, "sync" if is_frozen else self._config.batch_norm, "run.prepare")  # pyright: ignore
        if self._worker.world_size > 1 and self._config.compile_mode is not None:
            check_recordable(model, self._config.compile_mode)

        # It moves to the device, and gets its weights: first those of a checkpoint, then those of worker 0. Complex
        # parameters stay complex, because float() and double() change real ones only.
        memory_format = torch.channels_last if self._config.channels_last else torch.preserve_format
        model.to(self._worker.device, memory_format=memory_format)  # pyright: ignore
        model.double() if self._config.precision == "float64" else model.float()
        name = self._state.add("model", model)  # after the cast, which would round the checkpoint's weights
        # With --compile, a hook before the forward would be compiled, too. A single worker needs one for dropout only.
        needs_hook = self._worker.world_size > 1 or dropout.has_layers(model)
        self.join(model, sees_forwards=needs_hook and not self._config.compile)

        apply_options(model, self._config)
        if is_built_by_options:
            self.built_by_options.add(str(model))  # its layers have other classes by now, and so another text
        self.named[name] = model.module if isinstance(model, AveragedModel) else model
        return model

    def add_average(self, average: WeightAverage) -> None:
        """Keep an ``average`` in checkpoints; the run is evaluated with it if it is that of the first network."""
        is_first = self.trained[:1] == [average.source]
        self.named[self._state.add("average" if is_first else "state", average)] = average.model
        if is_first:
            self._average = average

    def begin_microbatch(self, microbatch: Batch, *, is_whole: bool) -> None:
        """Make all networks ready for forwards and backwards of ``microbatch``.

        ``is_whole``: it holds all of this worker's images of the step.
        """
        self.begin_images()
        self.num_channels = microbatch.images.shape[1]
        self.begin(
            microbatch.num_used,
            microbatch.samples,
            step=microbatch.step,
            seed=self._config.seed,
            # The gradients of a whole batch on a single worker are those of the global batch already.
            scales_gradients=self._worker.world_size > 1 or not is_whole or not microbatch.num_used,
        )

    def begin_images(self) -> None:
        """Let networks that are recorded in CUDA graphs overwrite the activations of earlier images."""
        if records_graphs(self._config.compile_mode):
            torch.compiler.cudagraph_mark_step_begin()

    def check_trained_by(self, optimizer: Optimizer) -> None:
        """Raise UsageError if ``optimizer`` trains a parameter that is in no prepared network.

        On several workers, also raise it for a parameter in a layer that the loop has put into a network since the
        microbatch began: its gradient was not summed.
        """
        new_or_unknown = self._unknown_parameters(optimizer)
        if not new_or_unknown:
            return
        self.collect_layers()  # with layers that the loop has put in since
        if unknown := self._unknown_parameters(optimizer):
            raise UsageError(
                f"The optimizer trains a parameter of the shape {tuple(unknown[0].shape)} that is in no prepared "
                "network, so no checkpoint would hold it: give its network to run.prepare, or nn.ParameterList([...]) "
                "of single ones."
            )
        if self._worker.world_size > 1:
            raise UsageError(
                f"The loop put a layer with a parameter of the shape {tuple(new_or_unknown[0].shape)} into a network "
                "after it got its batch, so that its first gradient is that of one worker's images: change the network "
                "before the next batch, at the start of an epoch."
            )

    def _unknown_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters of ``optimizer`` with a gradient that were in no network when layers were collected."""
        trained = (parameter for parameter in parameters_of(optimizer) if parameter.grad is not None)
        return [parameter for parameter in trained if id(parameter) not in self.parameter_ids]

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which networks compute in the run's precision."""
        return mixed_precision(self._config.precision, self._worker.device)

    @property
    def evaluated(self) -> nn.Module:
        """The first network, or the average of its weights that the loop prepares. Raises UsageError without one."""
        if not self.trained:
            raise UsageError(
                "The run is evaluated, and the loop has prepared no network; give it to run.prepare first, or measure "
                "in your own way with run.epochs(evaluate=...)."
            )
        return self._average.model if self._average else self.trained[0]

    @contextmanager
    def evaluating(self, *, keeps_weights: bool = False) -> Iterator[None]:
        """Put all networks into evaluation mode for this context; afterwards each layer is in its own mode again.

        In the context, networks compute in the run's precision, and it is noted which ones are called, for
        :meth:`measured`. With ``keeps_weights``, worker 0 copies the weights of each of these, for
        :meth:`swapped_weights`.
        """
        self.join_statistics()  # the loop may have used the networks since its last backward
        modes = [(layer, layer.training) for model in self.trained for layer in model.modules()]
        for model in self.trained:
            model.eval()
        # Note which networks the evaluation calls, by hooks. With --compile, hooks would be compiled, too, so all
        # networks count as called.
        if self._config.compile:
            self._called, hooks = dict.fromkeys(self.named), []
        else:
            self._called = {}
            note = partial(_note_call, self._called, keeps_weights and self._worker.rank == 0)
            hooks = [model.register_forward_pre_hook(partial(note, name)) for name, model in self.named.items()]
        try:
            with self.computing():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer, training in modes:
                layer.training = training

    def measured(self) -> str | None:
        """Return the name of the network that the last evaluation called; None if it called none.

        If it called several, that is the average of the first network's weights, or else the one prepared first.
        """
        averages_first = sorted(self.named, key=lambda name: name != "average")
        return next((name for name in averages_first if name in self._called), None)

    def is_built_by_loop(self) -> bool:
        """Return whether the loop, not the options, made the network that was measured, or that will be."""
        measured = self.measured()
        return str(self.named[measured] if measured else self.evaluated) not in self.built_by_options

    def swapped_weights(self) -> dict[str, StateDict]:
        """Return the weights that the last evaluation measured, if the network has other weights now; else nothing.

        They are by the name under which a checkpoint keeps them beside the network's own weights. Schedule-free
        optimizers, and averages that are copied into the network, swap the weights for an evaluation, and swap them
        back. Later commands use the weights that were measured.
        """
        name = self.measured()
        measured = None if name is None else self._called.get(name)
        if name is None or measured is None:
            return {}
        current = {key: value for key, value in self.named[name].state_dict().items() if isinstance(value, Tensor)}
        # A loop may have removed a parametrisation since, after which weights have other names.
        is_same = current.keys() <= measured.keys() and all(
            torch.equal(measured[key], value) for key, value in current.items()
        )
        return {} if is_same else {f"{name}{MEASURED}": measured}

    def first_not_finite(self) -> str | None:
        """Return the name of the first weight or running statistic that is not finite; None if all are.

        The host waits for the device once.
        """
        tensors = {
            name: tensor
            for name, tensor in self._tensors().items()
            if isinstance(tensor, nn.Parameter) or name.rpartition(".")[2] in _FINITE_BUFFERS
        }
        if not tensors:
            return None
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
        return next((name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None)

    def digest(self) -> list[float]:
        """Return numbers that change if a weight or a buffer changes. The host waits for the device once."""
        return digest_of_tensors(self._tensors().values()).flatten().tolist()

    def digest_of_weights(self) -> Tensor:
        """Return sums of the weights, (k, 4), which change if the weights do; (0, 4) if none of them can learn.

        Otherwise weights without gradients count, too: a loop may compute them, as the gradient of a whole epoch for
        SVRG. The sums are on the device, so that the host does not wait for it.
        """
        weights = [weight for model in self.trained for weight in model.parameters()]
        return digest_of_tensors(weights if any(weight.requires_grad for weight in weights) else [])

    def check_agreement(self, step: int) -> None:
        """Raise UsageError, on all workers, if they differ in a weight or a buffer after ``step`` steps."""
        if self._worker.world_size == 1:
            return
        tensors = self._tensors()
        names = find_differing(tensors, step, self._worker.device)
        if names:
            is_weight = any(isinstance(tensors[name], nn.Parameter) for name in names)
            raise UsageError(
                f"After step {step:,} the workers differ in {some_of(names)}: "
                f"{_CAUSE_IN_WEIGHTS if is_weight else _CAUSE_IN_BUFFERS}, or train on one worker."
            )

    def weight_names(self) -> dict[int, str]:
        """Return the names of all parameters by their IDs, such as ``network 2's 0.weight``."""
        return {id(tensor): name for name, tensor in self._tensors().items() if isinstance(tensor, nn.Parameter)}

    def _tensors(self) -> dict[str, Tensor]:
        """Return all weights and buffers by name, also buffers that are in no checkpoint."""
        tensors: dict[str, Tensor] = {}
        for number, model in enumerate(self.trained, start=1):
            prefix = f"network {number}'s " if number > 1 else ""
            # Leave out the statistics of a worker's own batch, which differ between workers by their nature.
            buffers = {
                name: buffer for name, buffer in model.named_buffers() if not name.endswith(batchnorm.LOCAL_BUFFERS)
            }
            state = {**buffers, **model.state_dict(keep_vars=True)}
            tensors.update({prefix + name: value for name, value in state.items() if isinstance(value, Tensor)})
        return tensors


def _note_call(called: dict[str, StateDict | None], keeps_weights: bool, name: str, model: nn.Module, *_: Any) -> None:
    """Note in ``called`` that ``model`` is called, with a copy of its weights if it ``keeps_weights``.

    It is a hook before the forward, at the top of the module so that an evaluation can pickle the network. Only the
    first call counts.
    """
    if name in called:
        return
    called[name] = None
    if keeps_weights:
        state: StateDict = model.state_dict()
        called[name] = {
            key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()
        }
