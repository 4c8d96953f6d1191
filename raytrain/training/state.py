"""The state that a checkpoint holds: everything that a loop has prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.errors import UsageError

StateDict = dict[str, Any]
_ASKED = "asked"
"""What a group of an optimizer keeps the options of its start under, before a scheduler changes them."""


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
        self._groups: dict[Optimizer, list[StateDict]] = {}

    def add(self, kind: str, thing: Stateful) -> None:
        """Keep ``thing``, and load it from the checkpoint; raises UsageError if the checkpoint does not fit it."""
        number = 1 + sum(name.partition("-")[0] == kind for name in self._objects)
        name = kind if number == 1 else f"{kind}-{number}"
        self._objects[name] = thing
        asked = [_options_of(group) for group in thing.param_groups] if isinstance(thing, Optimizer) else []
        if self._resumes:
            self._load(name, thing)
        if isinstance(thing, Optimizer):
            for options, group in zip(asked, thing.param_groups, strict=True):
                _apply_changes(options, group)
            self._groups[thing] = [_options_of(group) for group in thing.param_groups]
        if isinstance(thing, LRScheduler) and self._resumes:  # when it was made, it set the rates of a first step
            groups = thing.optimizer.param_groups
            for options, group in zip(self._groups.get(thing.optimizer, []), groups, strict=False):
                group.update(options)

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
        state = self._restored.pop(name)
        if isinstance(thing, Optimizer):
            _check_same_kind(thing, state)
        try:
            thing.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            what = "network" if isinstance(thing, nn.Module) else name
            difference = " ".join(str(error).split())[:300]
            raise UsageError(f"The checkpoint's {what} is not the one that the loop prepares: {difference}") from None


def _options_of(group: StateDict) -> StateDict:
    return {name: value for name, value in group.items() if name not in ("params", _ASKED)}


def _apply_changes(asked: StateDict, group: StateDict) -> None:
    """Give a group, as a checkpoint has it, the options that this start asks for and the one before did not.

    Others stay, for a scheduler may have changed them since.
    """
    before = group.get(_ASKED, asked)
    group.update({name: value for name, value in asked.items() if name in before and before[name] != value})
    group[_ASKED] = asked


def _check_same_kind(optimizer: Optimizer, state: StateDict) -> None:
    """Raise UsageError if the ``state`` of a checkpoint is that of another optimizer, told by the options it has."""
    own, stored = (set(_options_of(groups[0])) for groups in (optimizer.param_groups, state["param_groups"]))
    if own - stored and stored - own:
        raise UsageError(
            f"The checkpoint's optimizer has the options {', '.join(sorted(stored - own))}, and the loop prepares "
            f"{type(optimizer).__name__}, which has {', '.join(sorted(own - stored))} in their place: take the same "
            "optimizer, or start a new run under another --name."
        )
