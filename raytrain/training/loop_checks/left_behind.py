"""Finds variables of a script that its loop changes in a worker's process, where the script does not see the change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from raytrain.config.user_code import variables_of

_COLLECTIONS = list, dict, set, deque, bytearray
_VALUES = int, float, str, type(None)


@dataclass(frozen=True)
class _Weights:
    """State of a network: how often its parameters were written to in place, all together, by torch's count."""

    num_writes: int


def states_of_variables(loop: Callable[..., Any]) -> dict[str, object]:
    """Return a state of each outside variable that ``loop`` names, to find changes by.

    Outside variables are the global ones, those of a function around the loop, the arguments of a partial function that
    are given by name, and the attributes of the object if the loop is a method. A plain value is its own state, a
    collection has its length as state, and a network a count of writes. Other variables are left out.

    Example: ``{"history": 0}`` for a loop that calls ``history.append(...)``
    """
    of_partial: dict[str, Any] = {}
    while isinstance(loop, partial):
        of_partial |= loop.keywords
        loop = loop.func
    owner = getattr(loop, "__self__", None)
    of_object = {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    if isinstance(owner, nn.Module):  # its weights are looked at together, not torch's lists of layers and hooks
        of_object = {name: value for name, value in of_object.items() if name[5:] not in nn.Module().__dict__}
        of_object["self"] = owner
    of_module, of_closure = variables_of(loop)
    variables = {**of_module, **of_closure, **of_partial, **of_object}
    states: dict[str, object] = {}
    for name, value in variables.items():
        if isinstance(value, nn.Module):
            states[name] = _Weights(sum(parameter._version for parameter in value.parameters()))
        elif isinstance(value, _COLLECTIONS):
            states[name] = len(value)
        elif isinstance(value, _VALUES):
            states[name] = value
    return states


def note_on_changes(before: dict[str, object], after: dict[str, object]) -> str | None:
    """Return a note on the variables that have changed between two results of :func:`states_of_variables`, if any.

    Example: ``note_on_changes({"history": 0}, {"history": 12})``
    """
    missing = object()
    states = ((name, before.get(name, missing), state) for name, state in after.items())
    # A NaN does not equal itself, but is the same object.
    changed = [name for name, state_before, state in states if state is not state_before and state != state_before]
    if not changed:
        return None

    # Advise for the kinds of what has changed: networks, other variables, or both.
    networks = [name for name in changed if isinstance(after[name], _Weights)]
    ways = ["raytrain.load gives it the trained network"] * bool(networks)
    ways += ["log numbers with run.log, or write a file"] * (len(networks) < len(changed))
    return (
        f"the loop has changed {', '.join(changed)} in the process of a worker, and the script that started the run "
        f"does not see it; {'; '.join(ways)}"
    )
