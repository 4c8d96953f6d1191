"""The networks that a loop has prepared, and what a run does to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.data.permutation import mix
from raytrain.training import batchnorm, dropout
from raytrain.training.average import WeightAverage
from raytrain.training.batch import Batch
from raytrain.training.state import CheckpointState
from raytrain.training.wrap_model import wrap_model


class PreparedModels:
    """Networks on this worker's device, restored from a checkpoint and joined with those of the other workers.

    Each network is added to ``state``, for checkpoints, and restored from it. ``wrapped`` are the networks that the
    loop trains.
    """

    def __init__(self, config: ResolvedConfig, device: torch.device, world_size: int, state: CheckpointState) -> None:
        self.wrapped: list[nn.Module] = []
        self._averages: list[WeightAverage] = []
        self._config = config
        self._device = device
        self._world_size = world_size
        self._state = state

    def add(self, model: nn.Module) -> nn.Module:
        """Prepare ``model``, in place, and return what the loop trains."""
        batchnorm.convert(model, self._config.batch_norm)
        dropout.convert(model)
        memory_format = torch.channels_last if self._config.channels_last else torch.preserve_format
        dtype = torch.float64 if self._config.precision == "float64" else torch.float32
        model.to(self._device, dtype, memory_format=memory_format)  # pyright: ignore
        self._state.add("model", model)  # after the cast, which would round restored weights
        if self._config.ema_decay is not None:
            self._add_average(model, self._config.ema_decay)
        wrapped = wrap_model(model, self._config, self._device, self._world_size)
        self.wrapped.append(wrapped)
        return wrapped

    @property
    def evaluated(self) -> nn.Module:
        """The first network, with averaged weights if ``--ema-decay`` asks for them."""
        return self._averages[0].model if self._averages else self.wrapped[0]

    def update_averages(self, step: int) -> None:
        """Add the weights after ``step`` (counted from 0) to their averages."""
        for average in self._averages:
            average.update(step)

    def are_finite(self) -> bool:
        """Whether every weight and running statistic is finite. The host waits for the device once."""
        tensors = [tensor for model in self.wrapped for tensor in _weights(model)]
        return not tensors or bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def _add_average(self, model: nn.Module, decay: float) -> None:
        average = WeightAverage(model, decay)
        self._state.add("average", average)
        wrap_model(average.model, self._config, self._device, world_size=1)
        self._averages.append(average)

    def train(self) -> None:
        """Put all networks into training mode."""
        for model in self.wrapped:
            model.train()

    def eval(self) -> None:
        """Put all networks into evaluation mode."""
        for model in self.wrapped:
            model.eval()

    def begin_part(self, part: Batch, *, is_last: bool) -> None:
        """A forward and backward of ``part`` follows. After the last one the gradients are joined."""
        for number, model in enumerate(self.wrapped):
            batchnorm.set_num_used(model, part.num_used)
            dropout.begin(model, part.samples, mix(self._config.seed, number), part.step)
            model.require_backward_grad_sync = is_last  # pyright: ignore[reportArgumentType]

    def backward(self, loss: Tensor) -> None:
        """Backpropagate ``loss``; what gradient checkpointing computes again changes no statistics."""
        with ExitStack() as stack:
            for model in self.wrapped:
                stack.enter_context(batchnorm.keep_statistics(model))
            loss.backward()

    def end_part(self) -> None:
        """The forward and backward are done: update the running statistics of batch norm from all workers' images."""
        for model in self.wrapped:
            batchnorm.update_running_statistics(model)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and running statistics; other buffers, such as attention masks, may well be infinite."""
    yield from model.parameters()
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            yield buffer
