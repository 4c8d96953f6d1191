"""Check, as far as it costs nothing, that a training loop keeps the rules: a mistake is an error in the first step."""

from __future__ import annotations

from torch import Tensor

from raytrain.errors import UsageError

_MEAN = 1  # torch's number for reduction="mean"


class LoopValidator:
    """Checks the calls of a loop in a step: at least one backward of a sum, then at least one optimizer step."""

    def __init__(self) -> None:
        self.stepped = False
        self._num_backwards = 0
        self._checked = False

    def begin(self) -> None:
        """The loop gets a batch."""
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
                "The loop calls run.step without run.backward before it in the same batch: without that the gradients "
                "are wrong."
            )
        self.stepped = True

    def complete(self) -> None:
        """The loop asks for the next batch."""
        if not self.stepped:
            raise UsageError(
                "The loop asks for the next batch without run.step(optimizer) for this one; every batch is one step, "
                "on every worker (several backwards before one step: loop over run.parts(batch), with --accumulate)."
            )


def check_loops_returned(num_returned: int, num_workers: int, step: int) -> None:
    """Raise UsageError if the loop has returned, after ``step`` completed steps, on some of the workers only."""
    if 0 < num_returned < num_workers:
        raise UsageError(
            f"After step {step:,} the loop returned on {num_returned} of {num_workers} workers and continued on the "
            "others; every worker must take the same steps: decide to break by what all of them know, such as "
            "run.total(...)."
        )


def _check_sum(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise UsageError(
            f"run.backward got a loss of shape {tuple(loss.shape)}; give it one number, the sum over the images."
        )
    node = loss.grad_fn
    if node is None:
        raise UsageError(
            "run.backward got a loss without a gradient; compute it from the output of a prepared network."
        )
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN:
        raise UsageError(
            'run.backward got a mean over the images; give it a sum (reduction="sum"): it divides by the images of the '
            "whole global batch itself, which no worker's mean does."
        )
