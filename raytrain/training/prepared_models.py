"""The networks that a loop has prepared, and what a run does to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain.config import ResolvedConfig
from raytrain.data.permutation import mix
from raytrain.training import batchnorm, dropout
from raytrain.training.average import WeightAverage
from raytrain.training.batch import Batch
from raytrain.training.gradients import JoinedGradients, broadcast_weights
from raytrain.training.protocols import Worker
from raytrain.training.state import CheckpointState
from raytrain.training.wrap_model import apply_options, full_precision, mixed_precision


class PreparedModels:
    """Networks on this worker's device, restored from a checkpoint and joined with those of the other workers.

    Each network is added to ``state``, for checkpoints, and restored from it. ``trained`` are the networks that the
    loop has prepared.
    """

    def __init__(self, config: ResolvedConfig, worker: Worker, state: CheckpointState) -> None:
        self.trained: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._averages: list[WeightAverage] = []
        self._config = config
        self._worker = worker
        self._state = state
        self._gradients = JoinedGradients(worker.world_size)
        self._is_last_part = True

    def add(self, model: nn.Module) -> nn.Module:
        """Prepare ``model``, in place, and return it."""
        batchnorm.convert(model, self._config.batch_norm)
        dropout.convert(model)
        self._move(model)
        self._state.add("model", model)  # after the cast, which would round restored weights
        if self._worker.world_size > 1:
            broadcast_weights(model)
        if self._config.ema_decay is not None:
            self._add_average(model, self._config.ema_decay)
        apply_options(model, self._config)
        self.trained.append(model)
        return model

    def join_gradients_of(self, optimizer: Optimizer) -> None:
        """Join the gradients of whatever ``optimizer`` trains, also what is in no network, such as a loss's weight."""
        self._optimizers.append(optimizer)

    @property
    def evaluated(self) -> nn.Module:
        """The first network, with averaged weights if ``--ema-decay`` asks for them."""
        return self._averages[0].model if self._averages else self.trained[0]

    def computing(self) -> AbstractContextManager[Any]:
        """A context in which networks compute in the run's precision."""
        return mixed_precision(self._config, self._worker.device)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In this context all networks are in evaluation mode; then each layer is in its own again."""
        modes = [(layer, layer.training) for model in self.trained for layer in model.modules()]
        for model in self.trained:
            model.eval()
        try:
            with self.computing():
                yield
        finally:
            for layer, training in modes:
                layer.training = training

    def are_finite(self) -> bool:
        """Whether every weight and running statistic is finite. The host waits for the device once."""
        tensors = [tensor for model in self.trained for tensor in _weights(model)]
        return not tensors or bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def begin_part(self, part: Batch, *, is_last: bool) -> None:
        """A forward and backward of ``part`` follows. In the last one the gradients are joined."""
        self._is_last_part = is_last
        for number, model in enumerate(self.trained):
            batchnorm.set_num_used(model, part.num_used)
            dropout.begin(model, part.samples, mix(self._config.seed, number), part.step)

    def backward(self, loss: Tensor) -> None:
        """Backpropagate ``loss``; what gradient checkpointing computes again changes no statistics."""
        with ExitStack() as stack:
            stack.enter_context(full_precision(self._worker.device))
            for model in self.trained:
                stack.enter_context(batchnorm.keep_statistics(model))
            self._gradients.backward(loss, self._parameters(), joins=self._is_last_part)

    def end_part(self) -> None:
        """The forward and backward are done: update the running statistics of batch norm from all workers' images."""
        for model in self.trained:
            batchnorm.update_running_statistics(model)

    def end_step(self, step: int) -> None:
        """The last part of ``step`` (counted from 0) is done, too: add the new weights to their averages."""
        self.end_part()
        for average in self._averages:
            average.update(step)

    def _parameters(self) -> list[Tensor]:
        """All parameters that are trained now, some more than once."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        in_models = [parameter for model in self.trained for parameter in model.parameters()]
        in_optimizers = [parameter for group in groups for parameter in group["params"]]
        return [parameter for parameter in (*in_models, *in_optimizers) if parameter.requires_grad]

    def _move(self, model: nn.Module) -> None:
        """To the device, in the precision of the run; complex numbers stay complex."""
        memory_format = torch.channels_last if self._config.channels_last else torch.preserve_format
        model.to(self._worker.device, memory_format=memory_format)  # pyright: ignore
        model.double() if self._config.precision == "float64" else model.float()

    def _add_average(self, model: nn.Module, decay: float) -> None:
        average = WeightAverage(model, decay)
        self._state.add("average", average)
        apply_options(average.model, self._config)
        self._averages.append(average)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and running statistics; other buffers, such as attention masks, may well be infinite."""
    yield from model.parameters()
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            yield buffer
