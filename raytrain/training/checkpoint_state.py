"""The state in checkpoints: of networks, optimizers and all else that a loop prepares, named by kind and order.

A loop prepares the same objects in the same order in each attempt. So the second network is ``model-2`` in the
checkpoint and after a resume, whatever the loop calls it. Each object is loaded when it is prepared: afterwards, a loop
cannot tell a resumed run from a new one.

Between ``run.prepare`` and its first epoch, a loop sets up what it has prepared: it copies weights from one network to
another, draws them again, and reparametrises layers. On a resume it does so again. So when the epochs begin, networks,
and what else the loop has changed in the meantime, get the state of the checkpoint again. Options of optimizers, such
as the learning rate, may also be changed by the user: :mod:`raytrain.training.resumed_optimizers` has their rules.

A loop may add groups to an optimizer while it trains, such as layers that learn from the third epoch on. A resume
prepares the optimizer without them: their state waits until the loop has added them again, before its first step.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from raytrain.errors import UsageError, format_count, some_of
from raytrain.training.metrics.prepared_metrics import is_metric, joined_state, prepare_metric
from raytrain.training.metrics.sample_margins import MARGINS, SampleMargins
from raytrain.training.resumed_optimizers import ResumedOptions, options_of

StateDict = dict[str, Any]
MEASURED = " as measured"  # suffix of the name of weights that were evaluated, if the network has other ones by now
_GROUPS_MISSING = (
    "The checkpoint's optimizer has {stored}, and the loop has only {prepared} in its first step after the resume: let "
    "it add the others as soon as their epoch has come or is over, as in `if epoch.number >= 2 and "
    "len(optimizer.param_groups) == 1:`, and run the command again."
)
_FROZEN_NOW = (
    "{names} have learned before this resume, and are frozen now: what the loop unfreezes in an epoch, it also has to "
    "unfreeze in a run that resumes after it, as in `if epoch.number >= 2:`, not `== 2`"
)
_LEARNS_NOW = (
    "{names} were frozen before this resume, and learn now: what the loop freezes in an epoch, it also has to freeze "
    "in a run that resumes after it, as in `if epoch.number >= 2:`, not `== 2`"
)
_FROZEN = "frozen"  # key of a checkpoint, for the names of the weights that do not learn, by network


class Stateful(Protocol):
    """A network, an optimizer, a moving average of weights, or any other object with these two methods."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass
class _Prepared:
    """An object that the loop has prepared, and what is still to be loaded into it on a resume.

    Attributes:
        state_at_start: what it gets again as the epochs begin, and at the first batch of an epoch that a resume enters
            in its middle, if the loop has changed it since; empty for optimizers, and from then on.
        state_as_loaded: the state that it returned after it was loaded, on the CPU; None for networks as the epochs
            begin, which always get their state again then.
        waiting: the state of an optimizer that has more groups than the loop has added by now.
    """

    thing: Stateful
    state_at_start: StateDict = field(default_factory=dict[str, Any])
    state_as_loaded: StateDict | None = None
    waiting: StateDict | None = None

    def is_as_loaded(self) -> bool:
        """Return True if it has not changed since it was loaded, as far as that is known."""
        loaded = self.state_as_loaded
        return loaded is not None and _is_same_state(to_cpu(self.thing.state_dict()), loaded)


class CheckpointState:
    """All prepared objects by kind and order (model, model-2, optimizer …), loaded from ``restored`` when added.

    ``restored`` is the state in the checkpoint from which the run resumes, empty if it begins. ``rank`` is that of this
    worker.

    Example::

        state = CheckpointState({})
        state.add("model", network)  # "model"
        state.add("optimizer", optimizer)  # "optimizer"
        state.check_complete()  # as the epochs begin
        state.state_dict()  # {"model": …, "optimizer": …, "frozen": …}
    """

    def __init__(self, restored: Mapping[str, StateDict], rank: int = 0) -> None:
        self._rank = rank
        self._resumes = bool(restored)
        # The states in the checkpoint that no prepared object has got yet.
        self._restored = {
            name: state for name, state in restored.items() if not name.endswith(MEASURED) and name != _FROZEN
        }
        self._restored_frozen = restored.get(_FROZEN)
        self._frozen_before_epochs: dict[str, list[str]] = {}  # as the loop has frozen weights by then
        self._prepared: dict[str, _Prepared] = {}  # by name
        self._metrics: dict[str, Any] = {}  # of torchmetrics: those of the prepared objects that are joined
        self._margins: SampleMargins | None = None
        self._options = ResumedOptions(resumes=self._resumes)
        # The first error of a network that its state did not fit. The loop may change its layers before its epochs
        # begin, as by a reparametrisation, so the state is loaded again by then.
        self._unfit_network: UsageError | None = None
        self._held: list[object] = []  # prepared objects, and optimizers that are their attributes
        self._is_complete = False  # the loop has begun its first epoch

    # When the loop prepares an object.

    def add(self, kind: str, thing: Stateful) -> str:
        """Keep ``thing`` under a name, which is returned, and load its state if the run resumes.

        The name is ``kind``, and a number from the second one of this kind on. Raises UsageError if ``thing`` has no
        state that a checkpoint can hold, if the first epoch has begun, or if the checkpoint does not fit it.
        """
        # Refuse now an object without a state; otherwise the first checkpoint would fail.
        methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
        if isinstance(thing, type) or not all(map(callable, methods)):
            shown = f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
            raise UsageError(
                f"run.prepare got {shown}; give it one thing with state_dict and load_state_dict: a network, an "
                "optimizer, nn.ParameterList([...]) of single parameters, or an object of a class of yours that has "
                "both methods."
            )

        if self._is_complete:
            raise UsageError(
                f"The loop prepares {type(thing).__name__} after its first epoch has begun, and a resume could not "
                "load it, as all is loaded before that: give it to run.prepare before `for epoch in run.epochs():`, "
                "and use it from the epoch on that needs it."
            )

        # Give it a name, and load its state.
        number = 1 + sum(name.partition("-")[0] == kind for name in self._prepared)
        name = kind if number == 1 else f"{kind}-{number}"
        if isinstance(thing, Optimizer):
            self._add_optimizer(name, thing)
        else:
            self._add(name, thing)
        if kind == "state":  # networks and optimizers always have a state that can be read
            check_readable({name: to_cpu(thing.state_dict())})
        self._held += [thing, *(value for value in _attributes(thing) if isinstance(value, Optimizer))]
        return name

    def add_metric(self, metric: Any, is_placeholder: Callable[[], bool]) -> None:
        """Keep an object of ``torchmetrics``, whose state in checkpoints is the joined state of all workers.

        After a resume, worker 0 continues from the joined state, and the others start empty. While ``is_placeholder()``
        is true, a batch has no images, and the metric's updates are left out.
        """
        prepare_metric(metric, is_placeholder)
        self._metrics[self.add("state", metric)] = metric
        if self._rank > 0:
            metric.reset()

    def add_margins(self, margins: SampleMargins) -> None:
        """Keep ``margins``, added up over the workers for each checkpoint; load restored ones, if any."""
        self._margins = margins
        margins.load(self._restored.pop(MARGINS, {}))

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Add ``optimizer``, and the optimizers that it wraps, whose state its own state_dict lacks.

        Sharpness-aware minimisation and Lookahead, for example, wrap another optimizer.
        """
        built = [options_of(group) for group in optimizer.param_groups]

        # Find the wrapped optimizers, alone or in lists, and of each of their groups, which group of this one it is.
        wrapped: dict[str, Optimizer] = {}
        for attribute, value in vars(optimizer).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            inners = [value for value in values if isinstance(value, Optimizer)]
            wrapped.update({f"{attribute.lstrip('_')} {number}": inner for number, inner in enumerate(inners, start=1)})
        index_of = {id(group): index for index, group in enumerate(optimizer.param_groups)}
        shared = {inner: [index_of.get(id(group)) for group in inner.param_groups] for inner in wrapped.values()}

        # Load all of them, and share the groups again, which load_state_dict has replaced by new ones.
        self._add(name, optimizer)
        for attribute, inner in wrapped.items():
            if inner not in self._options.optimizers:
                self._add_optimizer(f"{attribute} of {name}", inner)
        for inner, indices in shared.items():
            for number, index in enumerate(indices):
                if index is not None:
                    inner.param_groups[number] = optimizer.param_groups[index]

        self._options.add(optimizer, built)

    def _add(self, name: str, thing: Stateful) -> None:
        """Keep ``thing`` under ``name``, and load its state if the run resumes."""
        prepared = self._prepared[name] = _Prepared(thing)
        if not self._resumes:
            return
        if name not in self._restored:
            raise UsageError(
                f"The checkpoint holds no {name}: it was made by another loop; prepare the same things in the same "
                "order, or start a new run under another --name."
            )
        state = self._restored.pop(name)
        if isinstance(thing, Optimizer):
            prepared.waiting = self._load_optimizer(name, thing, state)
        elif isinstance(thing, nn.Module):
            prepared.state_at_start = {} if is_metric(thing) else state
            try:
                _load(name, thing, state)
            except UsageError as error:
                self._unfit_network = self._unfit_network or error
        else:
            prepared.state_at_start = copy.deepcopy(state)  # the object may keep the state, and change it
            _load(name, thing, state)
            prepared.state_as_loaded = to_cpu(thing.state_dict())

    def _load_optimizer(self, name: str, optimizer: Optimizer, state: StateDict) -> StateDict | None:
        """Load ``state`` into ``optimizer``; return it if it has groups for which it waits, else None."""
        # torch silently loads the state of another kind. It is refused if each kind has options that the other lacks; a
        # newer torch may only have added some.
        stored_groups = state.get("param_groups", optimizer.param_groups)  # some optimizers' states have none
        prepared, stored = (set(options_of(groups[0])) for groups in (optimizer.param_groups, stored_groups))
        if prepared - stored and stored - prepared:
            raise UsageError(
                f"The checkpoint's optimizer has the options {', '.join(sorted(stored - prepared))}, and the loop "
                f"prepares {type(optimizer).__name__}, which has {', '.join(sorted(prepared - stored))} in their "
                "place: take the same optimizer, or start a new run under another --name."
            )
        # The state of groups that the loop adds later waits for them.
        num_groups = len(optimizer.param_groups)
        waits = len(stored_groups) > num_groups
        try:
            _load(name, optimizer, _of_first_groups(state, num_groups) if waits else state)
        except UsageError as error:
            raise self._unfit_network or error from None
        return state if waits else None

    # When the loop begins its epochs, and before the first step of an optimizer.

    def check_complete(self, *, within_epoch: bool = False) -> None:
        """Allow no further objects, as the first epoch begins, and undo what the loop's set-up did to restored ones.

        If a resume begins ``within_epoch``, keep their states for :meth:`undo_start_of_epoch`. Raises UsageError if the
        checkpoint has the state of what the loop did not prepare.
        """
        if not self._is_complete:
            self._load_what_has_changed()
            self._options.restore(self._held)
            if within_epoch:
                for prepared in self._prepared.values():
                    if not isinstance(prepared.thing, Optimizer):
                        prepared.state_at_start = prepared.state_as_loaded = to_cpu(prepared.thing.state_dict())
                self._options.keep_entered()
        self._is_complete = True
        self._frozen_before_epochs = self._frozen()
        if self._restored:
            raise UsageError(
                f"The checkpoint holds {', '.join(self._restored)}, which this loop does not prepare: it was made by "
                "another loop, or prepares that after run.epochs(); prepare the same things in the same order before "
                "it, or start a new run under another --name."
            )

    def undo_start_of_epoch(self) -> None:
        """Undo what the loop has done to prepared objects since a resume has entered an epoch in its middle.

        A loop may change them between the start of an epoch and its first batch: it multiplies a rate, steps a
        scheduler, or copies weights to a teacher. The attempt before has done so, and the checkpoint has the result.
        """
        self._load_what_has_changed()
        self._options.restore_entered()

    def _load_what_has_changed(self) -> None:
        """Load again networks, and what else the loop has changed since it was loaded, and forget their states.

        An object of the user's own may not expect to be loaded twice, so that is done only if it has changed.
        """
        for name, prepared in self._prepared.items():
            if prepared.state_at_start and not prepared.is_as_loaded():
                _load(name, prepared.thing, prepared.state_at_start)
            prepared.state_at_start, prepared.state_as_loaded = {}, None

    def load_added_groups(self, optimizer: Optimizer) -> None:
        """Load the state of groups that the loop has added since it prepared ``optimizer``, before its first step.

        Nothing happens if the checkpoint had no more groups than were prepared. Raises UsageError if the optimizer has
        another number of groups by now than in the checkpoint, or they do not fit.
        """
        prepared = next((prepared for prepared in self._prepared.values() if prepared.thing is optimizer), None)
        if prepared is None or prepared.waiting is None:
            return
        state = prepared.waiting
        num_stored, num_prepared = len(state["param_groups"]), len(optimizer.param_groups)
        if num_stored != num_prepared:
            stored = f"{format_count(num_stored, 'group')} of parameters"
            raise UsageError(_GROUPS_MISSING.format(stored=stored, prepared=format_count(num_prepared, "group")))
        options_before = [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"The checkpoint's optimizer is not the one that the loop prepares: {error}.") from None
        self._options.restore_added_groups(optimizer, options_before)
        prepared.waiting = None

    def notes_on_freezing(self, *, within_epoch: bool) -> Iterator[str]:
        """Yield a note if weights are frozen after the first step of a resume that have learned before, or vice versa.

        A resume ``within_epoch`` must have the same weights frozen. At the start of an epoch, the loop may freeze some,
        or unfreeze them: weights that learn then are not reported, and frozen ones only if they were so before the
        first epoch.
        """
        before, now = self._restored_frozen or {}, self._frozen()
        frozen, learning = list[str](), list[str]()
        for network in (name for name in now if name in before):
            newly_frozen = [name for name in now[network] if name not in before[network]]
            frozen += [name for name in newly_frozen if within_epoch or name in self._frozen_before_epochs[network]]
            learning += [name for name in before[network] if name not in now[network] and within_epoch]
        if frozen:
            yield _FROZEN_NOW.format(names=some_of(frozen))
        if learning:
            yield _LEARNS_NOW.format(names=some_of(learning))

    # While it trains: what is prepared.

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are prepared."""
        return self._options.optimizers

    def holds(self, thing: object) -> bool:
        """Return whether checkpoints have the state of ``thing``, or of an object of which an optimizer is a part."""
        return any(thing is held for held in (*self.optimizers, *self._held))

    def holds_within(self, thing: object) -> bool:
        """Return whether checkpoints have the state of ``thing``, or of an object that has it as an attribute."""
        return self.holds(thing) or any(thing is part for held in self._held for part in _attributes(held))

    def holds_scheduler(self, optimizer: Optimizer) -> bool:
        """Return whether a prepared object, or one of its attributes, is a scheduler of ``optimizer``."""
        candidates = [candidate for thing in self._held for candidate in (thing, *_attributes(thing))]
        return any(getattr(candidate, "optimizer", None) is optimizer for candidate in candidates)

    def addresses(self) -> set[int]:
        """Return the memory addresses of the tensors of all that is prepared except for optimizers.

        These tensors are in networks, moving averages, networks in attributes of other objects, and state_dicts.
        """
        things = [prepared.thing for prepared in self._prepared.values() if not isinstance(prepared.thing, Optimizer)]
        inside = [value for thing in things for value in _attributes(thing) if isinstance(value, nn.Module)]
        networks = [thing for thing in (*things, *inside) if isinstance(thing, nn.Module)]
        tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
        states = [
            leaf for thing in things for leaf in tree_leaves(thing.state_dict()) if isinstance(leaf, torch.Tensor)
        ]
        return {tensor.data_ptr() for tensor in (*tensors, *states) if not nn.parameter.is_lazy(tensor)}

    # At a checkpoint, and when one is evaluated at the end.

    def state_dict(self) -> dict[str, StateDict]:
        """Return the state of every prepared object, by name, and the names of the weights that do not learn."""
        # An optimizer whose groups the loop has not added again yet keeps the state that waits for them.
        states = {
            name: prepared.thing.state_dict() if prepared.waiting is None else prepared.waiting
            for name, prepared in self._prepared.items()
        }
        return {**states, _FROZEN: self._frozen()}

    def _frozen(self) -> dict[str, list[str]]:
        """Return the names of the weights that do not learn, by network."""
        return {
            name: [key for key, weight in prepared.thing.named_parameters() if not weight.requires_grad]
            for name, prepared in self._prepared.items()
            if isinstance(prepared.thing, nn.Module)
        }

    def joined_metrics(self, world_size: int) -> dict[str, StateDict]:
        """Return the states of all workers' metrics and margins, by name. Every worker calls this."""
        states = {name: joined_state(metric, world_size) for name, metric in self._metrics.items()}
        margins = self._margins.joined_state() if self._margins else {}
        return {**states, MARGINS: margins} if margins else states

    def load_again(self, state: Mapping[str, StateDict]) -> None:
        """Load everything but the metrics again, from the ``state`` of a checkpoint that will be evaluated."""
        for name, prepared in self._prepared.items():
            if name in self._metrics or name not in state:
                continue
            thing, stored = prepared.thing, state[name]
            if isinstance(thing, Optimizer) and len(stored.get("param_groups", ())) < len(thing.param_groups):
                continue  # the loop has added groups since, and an evaluation needs no optimizer
            thing.load_state_dict(stored)


def _load(name: str, thing: Stateful, state: StateDict) -> None:
    """Load ``state`` into a prepared ``thing`` of this ``name``. Raises UsageError if it does not fit."""
    try:
        thing.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        shown = "network" if isinstance(thing, nn.Module) else name
        difference = " ".join(str(error).split())[:300]
        raise UsageError(f"The checkpoint's {shown} is not the one that the loop prepares: {difference}") from None


def _attributes(thing: object) -> list[Any]:
    """Return the values of the attributes of ``thing``; none of an object with ``__slots__``."""
    return [*getattr(thing, "__dict__", {}).values()]


def _of_first_groups(state: StateDict, num_groups: int) -> StateDict:
    """Return the part of an optimizer's ``state`` that belongs to its first ``num_groups`` groups."""
    groups = state["param_groups"][:num_groups]
    numbers = {number for group in groups for number in group["params"]}
    return {
        **state,
        "state": {number: of_weight for number, of_weight in state["state"].items() if number in numbers},
        "param_groups": groups,
    }


def _is_same_state(one: StateDict, other: StateDict) -> bool:
    """Return whether two nested state_dicts hold the same tensors, numbers and texts."""
    leaves, other_leaves = tree_leaves(one), tree_leaves(other)
    if len(leaves) != len(other_leaves):
        return False
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        are_tensors = isinstance(leaf, torch.Tensor) and isinstance(other_leaf, torch.Tensor)
        if not (torch.equal(leaf, other_leaf) if are_tensors else np.array_equal(leaf, other_leaf)):
            return False
    return True


def to_cpu(state: Any) -> Any:
    """Return a copy of nested state_dicts with every tensor on the CPU; later steps do not change it.

    NumPy's numbers become Python's, and named tuples plain ones, which can be read without running code.
    """
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: to_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        kind = list if isinstance(state, list) else tuple
        return kind(to_cpu(value) for value in state)
    return state.item() if isinstance(state, np.generic) else copy.copy(state)


def check_readable(state: dict[str, StateDict]) -> None:
    """Raise UsageError if ``state`` contains an object that could only be read by running code."""
    for name, content in state.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        try:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            kind = re.search(r"GLOBAL (\S+)", str(error))
            raise UsageError(
                f"The state of what the loop prepares as {name} cannot be in a checkpoint: it holds "
                f"{kind[1] if kind else 'an object'}, which only running code can read; let its state_dict() return "
                "tensors, numbers, texts, lists and dictionaries."
            ) from None
