"""What a loop must keep to, where it can be seen at no cost: a mistake is told in its first step, not by a strange result."""

from __future__ import annotations

from torch import Tensor

from raytrain.errors import UsageError

_MEAN = 1  # torch's number for reduction="mean"


class LoopValidator:
    """Sees what a loop does in a step: at least one backward, then at least one step, with a sum as its loss."""

    def __init__(self) -> None:
        self.stepped = False
        self._num_backwards = 0
        self._checked = False

    def begin(self) -> None:
        """A batch is handed to the loop."""
        self.stepped = False
        self._num_backwards = 0

    def backward(self, loss: Tensor) -> None:
        """The loop backpropagates ``loss``."""
        self._num_backwards += 1
        if not self._checked:
            self._checked = True
            _check_sum(loss)

    def step(self) -> None:
        """The loop steps an optimizer."""
        if not self._num_backwards:
            raise UsageError(
                "The loop calls run.step without run.backward before it in the same batch: without that the gradients are wrong."
            )
        self.stepped = True

    def complete(self) -> None:
        """The loop asks for the next batch."""
        if not self.stepped:
            raise UsageError(
                "The loop asks for the next batch without run.step(optimizer) for this one; every batch is one step, on every worker "
                "(several backwards before one step: loop over run.parts(batch), with --accumulate)."
            )


def _check_sum(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise UsageError(f"run.backward was given a loss of shape {tuple(loss.shape)}; give it one number, the sum over the images.")
    node = loss.grad_fn
    if node is None:
        raise UsageError("run.backward was given a loss without a gradient; compute it from what a prepared network returns.")
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN:
        raise UsageError(
            'run.backward was given a mean over the images; give it a sum (reduction="sum"): it divides by the images of the whole '
            "global batch itself, which no worker's mean does."
        )
