"""An exponential moving average of a network's weights, which often does better than the weights themselves."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from raytrain.training.state import StateDict


class WeightAverage:
    """The average of the weights and running statistics of ``model``, as a network of its own in evaluation mode.

    In a loop of your own, ``run.prepare(WeightAverage(network, 0.999))`` puts it into the checkpoints, and
    ``average.update(batch.step)`` follows each optimizer step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._source = model
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after ``step`` (counted from 0). The decay is smaller in the first steps."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for average, source in zip(_weights(self.model), _weights(self._source), strict=True):
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
