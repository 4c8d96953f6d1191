"""What a loop has prepared: all that a checkpoint holds, and gives back."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from raytrain.errors import UsageError


class CheckpointState:
    """Things with ``state_dict`` and ``load_state_dict`` by kind and order: model, model-2, optimizer, state, …

    ``restored`` is the state of a checkpoint, from which each is loaded as it is added; empty for a new run.
    """

    def __init__(self, restored: dict[str, Any]) -> None:
        self._things: dict[str, Any] = {}
        self._restored = restored
        self._resumes = bool(restored)

    def add(self, kind: str, thing: Any) -> None:
        """Keep ``thing``, as the checkpoint has it; raises UsageError where the checkpoint has no such thing, or another."""
        number = 1 + sum(name.partition("-")[0] == kind for name in self._things)
        name = kind if number == 1 else f"{kind}-{number}"
        self._things[name] = thing
        rates = [group["lr"] for group in thing.param_groups] if isinstance(thing, Optimizer) else []
        if self._resumes:
            self._load(name, thing)
        for rate, group in zip(rates, getattr(thing, "param_groups", []), strict=False):
            group["initial_lr"] = rate  # of this run's options, not of those that the checkpoint was made with

    def check_complete(self) -> None:
        """Raise UsageError where the checkpoint holds something that the loop did not prepare."""
        if self._restored:
            raise UsageError(
                f"The checkpoint holds {', '.join(self._restored)}, which this loop does not prepare: it was made by another loop; "
                "prepare the same things in the same order, or start a new run under another --name."
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of everything, by name."""
        return {name: thing.state_dict() for name, thing in self._things.items()}

    def _load(self, name: str, thing: Any) -> None:
        if name not in self._restored:
            raise UsageError(
                f"The checkpoint holds no {name}: it was made by another loop; prepare the same things in the same order, or start a new "
                "run under another --name."
            )
        try:
            thing.load_state_dict(self._restored.pop(name))
        except (RuntimeError, ValueError, KeyError) as error:
            what = "network" if isinstance(thing, nn.Module) else name
            difference = " ".join(str(error).split())[:300]
            raise UsageError(f"The checkpoint's {what} is not the one that the loop prepares: {difference}") from None
