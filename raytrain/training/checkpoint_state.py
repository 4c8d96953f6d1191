"""The state that checkpoints hold: of networks, optimizers and whatever else a loop prepares, by kind and order."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from raytrain.errors import UsageError
from raytrain.training.prepared_metrics import joined_state, prepare_metric

StateDict = dict[str, Any]
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # of a group
MEASURED = " as measured"  # ends the name of weights that an evaluation had, and the network has no more
_ASKED = "asked"  # what a group of an optimizer keeps the options of its start under, before a scheduler changes them


class Stateful(Protocol):
    """A network, an optimizer, a moving average of weights, or anything else with the two methods."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class CheckpointState:
    """The prepared objects by kind and order (model, model-2, optimizer …), loaded from ``restored`` when added."""

    def __init__(self, restored: Mapping[str, StateDict], rank: int = 0) -> None:
        self._rank = rank
        self._metrics: dict[str, Any] = {}  # of torchmetrics
        self._objects: dict[str, Stateful] = {}
        self._restored = {name: state for name, state in restored.items() if not name.endswith(MEASURED)}
        self._resumes = bool(restored)
        self._groups: dict[Optimizer, list[StateDict]] = {}
        self._ratios: dict[Optimizer, list[float]] = {}  # new learning rate to old one, of each group
        self._held: list[object] = []  # what was prepared, and optimizers that it holds

    def add(self, kind: str, thing: Stateful) -> str:
        """Keep ``thing`` under a name, which is returned, and load it.

        Raises UsageError if it has no state, or if the checkpoint does not fit it.
        """
        _check_has_state(thing)
        number = 1 + sum(name.partition("-")[0] == kind for name in self._objects)
        name = kind if number == 1 else f"{kind}-{number}"
        if isinstance(thing, Optimizer):
            self._add_optimizer(name, thing)
        else:
            self._add(name, thing)
        if kind == "state":  # of the others torch is known to make what can be read
            check_readable({name: to_cpu(thing.state_dict())})
        self._held += [thing, *(each for each in vars(thing).values() if isinstance(each, Optimizer))]
        optimizer = getattr(thing, "optimizer", None)
        if self._resumes and isinstance(optimizer, Optimizer):  # a scheduler, which set the rates of a first step
            for options, group in zip(self._groups.get(optimizer, []), optimizer.param_groups, strict=False):
                group.update(options)
            _scale_base_rates(thing, self._ratios.get(optimizer, []))
        return name

    def add_metric(self, metric: Any, is_placeholder: Callable[[], bool]) -> None:
        """Keep an object of ``torchmetrics``, whose state is that of all workers in checkpoints.

        After a resume, worker 0 goes on with all of it, and the others start from nothing.
        """
        prepare_metric(metric, is_placeholder)
        self._metrics[self.add("state", metric)] = metric
        if self._rank > 0:
            metric.reset()

    def joined_metrics(self, world_size: int) -> dict[str, StateDict]:
        """Return the states of all workers' metrics, by name. Every worker calls this."""
        return {name: joined_state(metric, world_size) for name, metric in self._metrics.items()}

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer is prepared."""
        return bool(self._groups)

    def holds_scheduler(self, optimizer: Optimizer) -> bool:
        """Return whether checkpoints hold a scheduler of ``optimizer``, or something that has one."""
        held = [each for thing in self._held for each in (thing, *vars(thing).values())]
        return any(getattr(each, "optimizer", None) is optimizer for each in held)

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether checkpoints hold the state of ``optimizer``, or that of something around it."""
        return optimizer in self._groups or any(optimizer is each for each in self._held)

    def check_complete(self) -> None:
        """Raise UsageError if the checkpoint holds something that the loop did not prepare."""
        if self._restored:
            raise UsageError(
                f"The checkpoint holds {', '.join(self._restored)}, which this loop does not prepare: it was made by "
                "another loop, or prepares that after run.epochs(); prepare the same things in the same order before "
                "it, or start a new run under another --name."
            )

    def state_dict(self) -> dict[str, StateDict]:
        """The state of every prepared object, by name."""
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Also one that it wraps, whose state its own lacks: sharpness-aware minimisation and Lookahead have such."""
        asked = [_options_of(group) for group in optimizer.param_groups]
        wrapped = _wrapped(optimizer)
        shared = {each: _places(each.param_groups, optimizer.param_groups) for each in wrapped.values()}
        self._add(name, optimizer)
        for attribute, each in wrapped.items():
            if each not in self._groups:
                self._add_optimizer(f"{attribute} of {name}", each)
        for each, places in shared.items():  # torch's load_state_dict makes new groups
            for own, place in places.items():
                each.param_groups[own] = optimizer.param_groups[place]
        pairs = zip(asked, optimizer.param_groups, strict=True)
        self._ratios[optimizer] = [_apply_changes(options, group) for options, group in pairs]
        self._groups[optimizer] = [_options_of(group) for group in optimizer.param_groups]

    def _add(self, name: str, thing: Stateful) -> None:
        self._objects[name] = thing
        if not self._resumes:
            return
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
            what, difference = "network" if isinstance(thing, nn.Module) else name, " ".join(str(error).split())[:300]
            raise UsageError(f"The checkpoint's {what} is not the one that the loop prepares: {difference}") from None


def to_cpu(state: Any) -> Any:
    """A copy of nested state_dicts that later steps do not change, with every tensor on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: to_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):  # a named tuple becomes a plain one, which can be read without running code
        kind = list if isinstance(state, list) else tuple
        return kind(to_cpu(value) for value in state)
    return state.item() if isinstance(state, np.generic) else copy.copy(state)


def check_readable(state: dict[str, StateDict]) -> None:
    """Raise UsageError if something in ``state`` could not be read again without running code."""
    for name, content in state.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        try:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise UsageError(
                f"The state of what the loop prepares as {name} cannot be in a checkpoint: it holds "
                f"{found[1] if found else 'an object'}, which only running code can read; let its state_dict() return "
                "tensors, numbers, texts, lists and dictionaries."
            ) from None


def _check_has_state(thing: object) -> None:
    """Raise UsageError if no checkpoint could hold ``thing``, which would be found out when the first is written."""
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    if isinstance(thing, type) or not all(map(callable, methods)):
        kind = f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
        raise UsageError(
            f"run.prepare got {kind}; give it one thing with state_dict and load_state_dict: a network, an optimizer, "
            "nn.ParameterList([...]) of single parameters, or an object of a class of yours that has both methods."
        )


def _wrapped(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that another one holds, alone or in lists, by a name each."""
    found: dict[str, Optimizer] = {}
    for attribute, value in vars(optimizer).items():
        several = value if isinstance(value, (list, tuple)) else [value]
        held = [each for each in several if isinstance(each, Optimizer)]
        found.update({f"{attribute.lstrip('_')} {number}": each for number, each in enumerate(held, start=1)})
    return found


def _places(groups: list[StateDict], others: list[StateDict]) -> dict[int, int]:
    """Where in ``others`` each of the ``groups`` is that is there, too."""
    return {own: place for own, group in enumerate(groups) for place, each in enumerate(others) if each is group}


def _options_of(group: StateDict) -> StateDict:
    return {name: value for name, value in group.items() if name not in ("params", _ASKED)}


def _apply_changes(asked: StateDict, group: StateDict) -> float:
    """Give a ``group`` of a checkpoint the options that changed since, and return by which ratio its rate changed.

    Options that did not change stay as they are in the checkpoint, where a scheduler may have changed them. A rate is
    multiplied by the ratio of the new to the old one, and so are the rates that schedulers keep in the group.
    """
    before = group.get(_ASKED, asked)
    changed = {name: value for name, value in asked.items() if name in before and _differs(before[name], value)}
    ratio = 1.0
    if "lr" in changed and float(before["lr"]):
        ratio = float(changed.pop("lr")) / float(before["lr"])
        group.update({name: group[name] * ratio for name in _RATES if name in group})
    group.update(changed)
    group[_ASKED] = asked
    return ratio


def _scale_base_rates(scheduler: Any, ratios: list[float]) -> None:
    """Multiply the rates that a scheduler of torch starts from by the ``ratios`` of the optimizer's groups."""
    for name in ("base_lrs", "max_lrs"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(ratios):  # pyright: ignore[reportUnknownArgumentType]
            setattr(scheduler, name, [rate * ratio for rate, ratio in zip(rates, ratios, strict=True)])


def _differs(before: Any, value: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return not torch.equal(before, value)
    return bool(before != value)


def _check_same_kind(optimizer: Optimizer, state: StateDict) -> None:
    """Raise UsageError if the ``state`` of a checkpoint is that of another optimizer, told by the options it has."""
    stored_groups = state.get("param_groups", optimizer.param_groups)  # some have a state of another form
    own, stored = (set(_options_of(groups[0])) for groups in (optimizer.param_groups, stored_groups))
    if own - stored and stored - own:
        raise UsageError(
            f"The checkpoint's optimizer has the options {', '.join(sorted(stored - own))}, and the loop prepares "
            f"{type(optimizer).__name__}, which has {', '.join(sorted(own - stored))} in their place: take the same "
            "optimizer, or start a new run under another --name."
        )
