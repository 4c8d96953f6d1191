"""Networks that a loop has prepared: exact gradients and batch norm, gradient checkpointing, compilation, averages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, SupportsInt

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError, some_of
from raytrain.training import batchnorm, dropout
from raytrain.training.autocast import mixed_precision, prepare_for_autocast
from raytrain.training.batch import Batch
from raytrain.training.checkpoint_state import MEASURED, CheckpointState, StateDict
from raytrain.training.gradients import ExactGradients, broadcast_weights, differing, digest_of_tensors
from raytrain.training.model import initialise_lazy_layers
from raytrain.training.optimisation import parameters_of
from raytrain.training.protocols import Worker

_CAUSE_IN_BUFFERS = (
    "a buffer is filled by a layer or the loop from a worker's own images; average or gather over the workers what "
    "goes into it, with torch.distributed"
)
_CAUSE_IN_WEIGHTS = (
    "something other than an optimizer's step changed them by a worker's own images or random numbers; compute what "
    "changes them from all workers' images, with run.total, run.mean or run.gather"
)
_SEQUENCES = (nn.Sequential, nn.ModuleList)


class WeightAverage:
    """The average of the weights and running statistics of ``model``, as a network of its own in evaluation mode.

    ``average = run.prepare(WeightAverage(network, 0.999))`` puts it into the checkpoints, and the run is evaluated with
    it; ``average.update(batch.step)`` follows each optimizer step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.source = model
        self._decay = decay
        if not 0 <= decay < 1:
            raise UsageError(f"WeightAverage got a decay of {decay!r}; give a number of at least 0 and below 1.")

    def __call__(self, images: Tensor) -> Any:
        """What the averaged network returns."""
        return self.model(images)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after ``step`` (counted from 0). The decay is smaller in the first steps."""
        if not isinstance(step, SupportsInt):
            raise UsageError(f"WeightAverage.update got a {type(step).__name__}; give it batch.step.")
        decay = min(self._decay, (1 + step) / (10 + step))
        for average, source in zip(_weights(self.model), _weights(self.source), strict=True):
            if average.is_floating_point() or average.is_complex():
                average.lerp_(source, 1 - decay)
            else:
                average.copy_(source)

    def state_dict(self) -> StateDict:
        """The averaged weights, by the names of the network's."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """The inverse of :meth:`state_dict`."""
        self.model.load_state_dict(state_dict)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, each once, also if it has several names."""
    yield from model.parameters()
    yield from model.buffers()


def shapes_of(model: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of the tensors of ``model``; lazy ones have none yet."""
    return [tuple(each.shape) for each in _weights(model) if not nn.parameter.is_lazy(each)]


def checkpoint_gradients(model: nn.Module) -> nn.Module:
    """Let ``model`` keep the inputs of its blocks only, and compute what is in them again when it needs gradients.

    Networks of timm know their blocks. Of others they are what follows each other in an ``nn.Sequential`` or
    ``nn.ModuleList`` and has layers of its own. The weights that are trained stay the same: our dropout draws the same
    numbers again, and our batch norm counts a batch once. Changes the network in place, and returns it. Raises
    UsageError if it has no blocks.
    """
    enable: Callable[[], Any] | None = getattr(model, "set_grad_checkpointing", None)
    if enable is not None:
        try:
            enable()
        except AssertionError as error:  # what timm's networks raise that have no blocks
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
    """The outermost blocks of layers that follow each other."""
    for child in module.children():
        is_block = isinstance(module, _SEQUENCES) and not isinstance(child, _SEQUENCES) and any(child.children())
        yield from [child] if is_block else _blocks(child)


def apply_options(model: nn.Module, config: TrainConfig) -> None:
    """Change ``model`` in place. Its class stays, and copies of it compute the same way with their own weights."""
    if config.gradient_checkpointing:
        batchnorm.count_once(checkpoint_gradients(model))
    prepare_for_autocast(model, config.precision)
    if config.compile:
        _compile(model)


def _compile(model: nn.Module) -> None:
    """Like ``nn.Module.compile``, which in torch 2.11 leaves out what is torch's own, such as nn.Sequential."""
    call = model._call_impl  # pyright: ignore[reportPrivateUsage]

    def call_all(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    model._compiled_call_impl = torch.compile(call_all)


class PreparedModels:
    """The networks that a loop has prepared, ``trained``: on this worker's device, in checkpoints, and joined."""

    def __init__(
        self,
        config: ResolvedConfig,
        worker: Worker,
        state: CheckpointState,
        share: Callable[[], Tensor | float],
        report: Callable[[str], None],
    ) -> None:
        self.trained: list[nn.Module] = []
        self.named: dict[str, nn.Module] = {}  # these and averages of weights, by their names in checkpoints
        self.gradients = ExactGradients(worker, share, self.join_statistics, report)
        self._average: WeightAverage | None = None  # of the first network
        self.built_by_options: set[str] = set()  # the layers of networks that are as the options name them, as text
        self._called: dict[str, StateDict | None] = {}  # in the last evaluation, with weights that it may have swapped
        self._config = config
        self._worker = worker
        self._state = state
        self._share = share
        self._num_used = 0  # images of this worker in the part that the loop computes
        self._counts_none: list[bool] = []  # whether the layers of each network take images for a placeholder
        self._num_used_of: Any = WeakIdKeyDictionary()  # the same by the images, also of parts before
        self._layers: list[list[nn.Module]] = []  # of each network, as they were when a part began
        self._parameters: list[Tensor] = []  # of them all, each once
        self.known: set[int] = set()  # their IDs

    def add(self, model: nn.Module) -> nn.Module:
        """Prepare ``model``, in place, and return it."""
        _check_not_scripted(model)
        is_built_by_options = str(model) in self.built_by_options
        initialise_lazy_layers(model, self._config.channels, self._config.full_image_size)
        batchnorm.convert(model, self._config.batch_norm)
        dropout.convert(model)
        self._move(model)
        name = self._state.add("model", model)  # after the cast, which would round restored weights
        if self._worker.world_size > 1:
            broadcast_weights(model)
        apply_options(model, self._config)
        if is_built_by_options:
            self.built_by_options.add(str(model))  # layers have other classes by now
        if self._worker.world_size > 1 and not self._config.compile:  # a hook would be compiled, too
            model.register_forward_pre_hook(_OfThisNetwork(partial(self._count, len(self.trained))))
        self.trained.append(model)
        self.named[name] = model.module if isinstance(model, AveragedModel) else model
        return model

    def add_average(self, average: WeightAverage) -> None:
        """Prepare an ``average``: one of the first network is what the run is evaluated with."""
        is_first = self.trained[:1] == [average.source]
        self.named[self._state.add("average" if is_first else "state", average)] = average.model
        if is_first:
            self._average = average

    def check_trained_by(self, optimizer: Optimizer) -> None:
        """Raise UsageError if ``optimizer`` trains what is in no prepared network, or was put into one just now."""
        unknown = self._unknown(optimizer)
        if not unknown:
            return
        self._look()
        for parameter in self._unknown(optimizer):
            raise UsageError(
                f"The optimizer trains a parameter of the shape {tuple(parameter.shape)} that is in no prepared "
                "network, so no checkpoint would hold it: give its network to run.prepare, or nn.ParameterList([...]) "
                "of single ones."
            )
        if self._worker.world_size > 1:
            raise UsageError(
                f"The loop put a layer with a parameter of the shape {tuple(unknown[0].shape)} into a network after it "
                "got its batch, so that its first gradient is that of one worker's images: change the network before "
                "the next batch, at the start of an epoch."
            )

    def _unknown(self, optimizer: Optimizer) -> list[Tensor]:
        return [each for each in parameters_of(optimizer) if each.grad is not None and id(each) not in self.known]

    @property
    def evaluated(self) -> nn.Module:
        """The first network, or the average of its weights that the loop prepares. Raises UsageError without one."""
        if not self.trained:
            raise UsageError(
                "The run is evaluated, and the loop has prepared no network; give it to run.prepare first, or measure "
                "in your own way with run.epochs(evaluate=...)."
            )
        return self._average.model if self._average else self.trained[0]

    def computing(self) -> AbstractContextManager[Any]:
        """A context in which networks compute in the run's precision."""
        return mixed_precision(self._config.precision, self._worker.device)

    @contextmanager
    def evaluating(self, *, keeps_weights: bool = False) -> Iterator[None]:
        """In this context all networks are in evaluation mode; then each layer is in its own again.

        With ``keeps_weights`` those of the called networks are copied, for :meth:`swapped_weights`.
        """
        self.join_statistics()  # the loop may have used the networks since its last backward
        modes = [(layer, layer.training) for model in self.trained for layer in model.modules()]
        for model in self.trained:
            model.eval()
        self._called = dict.fromkeys(self.named if self._config.compile else ())  # a hook would be compiled, too
        watched = () if self._config.compile else self.named.items()
        note = partial(_note, self._called, keeps_weights and self._worker.rank == 0)
        hooks = [each.register_forward_pre_hook(partial(note, name)) for name, each in watched]
        try:
            with self.computing():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer, training in modes:
                layer.training = training

    def measured(self) -> str | None:
        """The name of what the last evaluation called: an average or the first network, if it called several."""
        in_order = sorted(self.named, key=lambda name: name != "average")
        return next((name for name in in_order if name in self._called), None)

    def is_own(self) -> bool:
        """Return whether the loop has built or changed the network that was measured, or that would be."""
        measured = self.measured()
        network = self.named[measured] if measured else self._average.model if self._average else self.trained[0]
        return str(network) not in self.built_by_options

    def swapped_weights(self) -> dict[str, StateDict]:
        """Return the weights that the last evaluation measured, by a name, if the network has others by now.

        Optimizers without a schedule and averages that are copied in swap the weights for an evaluation, and swap them
        back. What a run has measured is what is used of it afterwards.
        """
        name = self.measured()
        kept = None if name is None else self._called.get(name)
        if name is None or kept is None:
            return {}
        now = self.named[name].state_dict()
        same = all(torch.equal(kept[key], each) for key, each in now.items() if isinstance(each, Tensor))
        return {} if same else {f"{name}{MEASURED}": kept}

    def not_finite(self) -> str | None:
        """Name of the first weight or running statistic that is not finite. The host waits for the device once."""
        tensors = {name: each for name, each in self._tensors().items() if _must_be_finite(name, each)}
        if not tensors:
            return None
        finite = torch.stack([each.isfinite().all() for each in tensors.values()]).tolist()
        return next((name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), None)

    def digest(self) -> list[float]:
        """Return numbers that change if a weight or a buffer does. The host waits for the device once."""
        return digest_of_tensors(self._tensors().values())

    def check_agreement(self, step: int) -> None:
        """Raise UsageError, on all workers, if they differ in a weight or a buffer after ``step`` steps."""
        if self._worker.world_size == 1:
            return
        tensors = self._tensors()
        names = differing(tensors, step)
        if names:
            is_weight = any(isinstance(tensors[name], nn.Parameter) for name in names)
            raise UsageError(
                f"After step {step:,} the workers differ in {some_of(names)}: "
                f"{_CAUSE_IN_WEIGHTS if is_weight else _CAUSE_IN_BUFFERS}, or train on one worker."
            )

    def begin_part(self, part: Batch, *, is_whole: bool) -> None:
        """Forwards and backwards of ``part`` follow, which is all of this worker's images if it ``is_whole``."""
        self.join_statistics()
        self._look()
        self._num_used_of[part.images] = self._num_used = part.num_used
        self._counts_none = [part.num_used == 0] * len(self._layers)
        for number, layers in enumerate(self._layers):
            batchnorm.set_num_used(layers, part.num_used, self._share)
            dropout.begin(layers, part.samples, mix(self._config.seed, number), part.step)
        self.gradients.reset()
        if self._worker.world_size > 1 or not is_whole or not part.num_used:
            self.gradients.follow(self._parameters)

    def _count(self, number: int, inputs: tuple[Any, ...]) -> None:
        """Before a forward: batch norm counts images as their own batch did, which a loop may have kept from before."""
        images = next((each for each in inputs if isinstance(each, Tensor)), None)
        num_used = self._num_used if images is None else self._num_used_of.get(images, self._num_used)
        if (num_used == 0) != self._counts_none[number]:
            batchnorm.set_num_used(self._layers[number], num_used)
            self._counts_none[number] = num_used == 0

    def join_statistics(self) -> None:
        """Update the running statistics of aggregated batch norm from all workers' images since the last time."""
        for layers in self._layers:
            batchnorm.update_running_statistics(layers)

    def _look(self) -> None:
        """Walk through all networks, which takes a part of a step of a small one: so each time for all that need it."""
        self._layers = [list(model.modules()) for model in self.trained]
        owners = (layer._parameters for layers in self._layers for layer in layers)  # pyright: ignore[reportPrivateUsage]
        self._parameters = list(dict.fromkeys(each for owner in owners for each in owner.values() if each is not None))
        self.known = set(map(id, self._parameters))

    def _tensors(self) -> dict[str, Tensor]:
        """Weights and buffers, also those that are in no checkpoint, by name."""
        found: dict[str, Tensor] = {}
        for number, model in enumerate(self.trained, start=1):
            before = f"network {number}'s " if number > 1 else ""
            buffers = [each for each in model.named_buffers() if not each[0].endswith(batchnorm.OWN_BUFFERS)]
            state = {**dict(buffers), **model.state_dict(keep_vars=True)}
            found.update({before + name: each for name, each in state.items() if isinstance(each, Tensor)})
        return found

    def _move(self, model: nn.Module) -> None:
        """To the device, in the precision of the run; complex numbers stay complex."""
        memory_format = torch.channels_last if self._config.channels_last else torch.preserve_format
        model.to(self._worker.device, memory_format=memory_format)  # pyright: ignore
        model.double() if self._config.precision == "float64" else model.float()


class _OfThisNetwork:
    """A hook of a network before its forward, which copies and pickles of the network do without."""

    def __init__(self, call: Callable[[tuple[Any, ...]], None] | None = None) -> None:
        self._call = call

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._call is not None:
            self._call(inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfThisNetwork, ()


def _check_not_scripted(model: nn.Module) -> None:
    """Raise UsageError if TorchScript trains in ``model``: nobody could join its batch norm, or see its layers."""
    scripts = [each for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]
    if any(list(each.parameters()) for each in scripts):
        raise UsageError(
            "run.prepare got a network of torch.jit, whose batch norm and dropout cannot be joined over the workers; "
            "prepare the network that was scripted or traced, with --compile if it is to be compiled."
        )


def _note(called: dict[str, StateDict | None], keeps_weights: bool, name: str, model: nn.Module, *_: object) -> None:
    if name not in called:
        state: StateDict = model.state_dict() if keeps_weights else {}
        copied = {key: each.detach().clone() if isinstance(each, Tensor) else each for key, each in state.items()}
        called[name] = copied if keeps_weights else None


def _must_be_finite(name: str, tensor: Tensor) -> bool:
    """Parameters and running statistics must; other buffers, such as attention masks, may well be infinite."""
    return isinstance(tensor, nn.Parameter) or name.rpartition(".")[2] in ("running_mean", "running_var")
