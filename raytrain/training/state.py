"""The state that a checkpoint holds: everything that a loop has prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from raytrain.errors import UsageError

StateDict = dict[str, Any]


class Stateful(Protocol):
    """A network, an optimizer, a moving average of weights, or anything else with the two methods."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class CheckpointState:
    """The prepared objects, named by kind and order: model, model-2, optimizer, state, …

    ``restored`` is the state in a checkpoint, from which each object is loaded when it is added; empty for a new run.
    """

    def __init__(self, restored: Mapping[str, StateDict]) -> None:
        self._objects: dict[str, Stateful] = {}
        self._restored = dict(restored)
        self._resumes = bool(restored)

    def add(self, kind: str, thing: Stateful) -> None:
        """Keep ``thing``, and load it from the checkpoint; raises UsageError if the checkpoint does not fit it."""
        number = 1 + sum(name.partition("-")[0] == kind for name in self._objects)
        name = kind if number == 1 else f"{kind}-{number}"
        self._objects[name] = thing
        rates = [group["lr"] for group in thing.param_groups] if isinstance(thing, Optimizer) else []
        if self._resumes:
            self._load(name, thing)
        if isinstance(thing, Optimizer):
            for rate, group in zip(rates, thing.param_groups, strict=False):
                # From the options of this start, not from those that the checkpoint was made with.
                group["initial_lr"] = rate

    def check_complete(self) -> None:
        """Raise UsageError if the checkpoint holds something that the loop did not prepare."""
        if self._restored:
            raise UsageError(
                f"The checkpoint holds {', '.join(self._restored)}, which this loop does not prepare: it was made by "
                "another loop; prepare the same things in the same order, or start a new run under another --name."
            )

    def state_dict(self) -> dict[str, StateDict]:
        """The state of every prepared object, by name."""
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def _load(self, name: str, thing: Stateful) -> None:
        if name not in self._restored:
            raise UsageError(
                f"The checkpoint holds no {name}: it was made by another loop; prepare the same things in the same "
                "order, or start a new run under another --name."
            )
        try:
            thing.load_state_dict(self._restored.pop(name))
        except (RuntimeError, ValueError, KeyError) as error:
            what = "network" if isinstance(thing, nn.Module) else name
            difference = " ".join(str(error).split())[:300]
            raise UsageError(f"The checkpoint's {what} is not the one that the loop prepares: {difference}") from None
