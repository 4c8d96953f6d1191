"""Late backwards: finds a loop that computes with a batch after it has asked for the next one, as to read ahead itself.

On one worker such a loop trains well, but a checkpoint between the two counts a batch of which the network has learned
nothing. On several workers, ``Steps.share`` refuses its backward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from raytrain.training.prepared_models import PreparedModels

_LATE = (
    "the loop computes with a batch after it has asked for the next one: a checkpoint or a stop in between counts the "
    "batch, without what the network learns from it, so a resume leaves it out; compute with each batch before asking "
    "for the next one, as a run reads images ahead by itself"
)


class LateBackward:
    """Reports a backward that comes after the last batch of an epoch, and before the loop asks for the next epoch.

    It is late if no optimizer has stepped in the first batch of the epoch, and one has in the last: the loop gets each
    batch ahead of its step.
    """

    def __init__(self, models: PreparedModels, world_size: int, report: Callable[[str], None]) -> None:
        self._models, self._world_size, self._report = models, world_size, report
        self._first_has_step = False  # an optimizer has stepped in the first batch of the epoch
        self._last_has_step = False  # and in the last one so far
        self._hook: RemovableHandle | None = None  # called by the next backward

    def end_step(self, has_stepped: bool, *, is_first: bool) -> None:
        """Note whether an optimizer ``has_stepped`` in a batch, which may be the first one of an epoch or attempt."""
        self._last_has_step = has_stepped
        if is_first:
            self._first_has_step = has_stepped

    def watch(self) -> None:
        """Report the next backward, if it comes before :meth:`end_watch` and is late."""
        if self._world_size > 1 or self._first_has_step or not self._last_has_step:
            return
        weights = [weight for model in self._models.trained for weight in model.parameters() if weight.requires_grad]
        if weights:
            self._hook = register_multi_grad_hook(weights, lambda _: self._report(_LATE), mode="any")

    def end_watch(self) -> None:
        """Report no further backward."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
