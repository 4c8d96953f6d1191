"""Moving average of a network's weights (EMA), with which a run is evaluated.

Torch's AveragedModel is not used, because it counts its updates itself, while the decay depends on the step of the run
here, and because its first update forgets the initial weights.
"""

from __future__ import annotations

import copy
from typing import Any, SupportsFloat, SupportsInt

import torch
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.training.checkpoint_state import StateDict


class WeightAverage:
    """Moving average of the weights and running statistics of ``model``, as a network of its own in evaluation mode.

    It begins with a copy of ``model``, ``average.model``. A prepared average is in the checkpoints, and the run is
    evaluated with it if it is that of the first prepared network. Call :meth:`update` after each step of the optimizer.
    ``decay`` is the share of the average that each step keeps, at least 0 and below 1.

    Raises UsageError for any other ``decay``.

    Example::

        average = run.prepare(WeightAverage(network, 0.999))
        for epoch in run.epochs():
            for batch in epoch:
                ...
                optimizer.step()
                average.update(batch.step)
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not isinstance(decay, SupportsFloat) or not 0 <= decay < 1:
            raise UsageError(f"WeightAverage got a decay of {decay!r}; give a number of at least 0 and below 1.")
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.source = model
        self._decay = decay

    def __call__(self, images: Tensor) -> Any:
        """Return the output of the averaged network for ``images``, (m, channels, H, W)."""
        return self.model(images)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after ``step`` (counted from 0) to the average, with a smaller decay in the first steps.

        The decay is at most (1 + step) / (10 + step), so that the initial weights are soon forgotten. Buffers of
        integers are copied. Raises UsageError if ``step`` is no number.
        """
        if not isinstance(step, SupportsInt):
            raise UsageError(f"WeightAverage.update got a {type(step).__name__}; give it batch.step.")
        decay = min(self._decay, (1 + step) / (10 + step))
        averages, sources = ((*model.parameters(), *model.buffers()) for model in (self.model, self.source))
        # One call averages all tensors, and one copies all others: a call for each would keep a GPU waiting.
        averaged: tuple[list[Tensor], list[Tensor]] = [], []
        copied: tuple[list[Tensor], list[Tensor]] = [], []
        for average, source in zip(averages, sources, strict=True):
            of_average, of_source = averaged if average.is_floating_point() or average.is_complex() else copied
            of_average.append(average)
            of_source.append(source)
        if averaged[0]:
            torch._foreach_lerp_(*averaged, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        if copied[0]:
            torch._foreach_copy_(*copied)  # pyright: ignore[reportPrivateImportUsage]

    def state_dict(self) -> StateDict:
        """Return the averaged weights, by the names that they have in the network."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Replace the averaged weights by those that :meth:`state_dict` has returned."""
        self.model.load_state_dict(state_dict)
