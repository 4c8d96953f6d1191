"""The options of prepared optimizers on a resume: those of the checkpoint, but for what the user has changed since.

An optimizer's state_dict holds its options, such as the learning rate, and would restore the old ones. Comparing them
with those that the loop builds the optimizer with does not show which ones the user has changed, because a scheduler
changes options while a run trains. So each group of an optimizer also keeps the options with which the first epoch of
its attempt began, under ``begun``. When the first epoch of a resume begins, these are compared with the options by
then, and only the ones that differ are set. If the learning rate has changed, the scheduled rate is multiplied by the
ratio.

Between ``run.prepare`` and its first epoch, a loop reads rates, as base rates of a schedule of its own, and sets them.
On a resume it does so again. So until the epochs begin, a group shows the rates and the like that the loop has built it
with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

Options = dict[str, Any]
"""The options of a group of an optimizer by name, or the group itself, which also has its parameters."""

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # options of a group, which schedulers keep there
_BEGUN = "begun"  # key in a group of an optimizer, for the options with which the epochs of its attempt began
# Options of a group that schedules change. Others may say in which state the weights are, such as ``train_mode``.
_SCHEDULED = (*_RATES, "momentum", "base_momentum", "max_momentum", "betas", "weight_decay")


class ResumedOptions:
    """The options of each group of the prepared optimizers, as the loop has built it and as the checkpoint has them.

    Example::

        options = ResumedOptions(resumes=True)
        built = [options_of(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        options.add(optimizer, built)
        options.restore([scheduler])  # as the epochs begin
    """

    def __init__(self, *, resumes: bool) -> None:
        self._resumes = resumes
        self._built: dict[Optimizer, list[Options]] = {}  # of each group as the loop has built it
        self._loaded: dict[Optimizer, list[Options]] = {}  # of each group after loading
        # As a resume has entered an epoch in its middle: the options of each group, and the states of the weights.
        self._entered: dict[Optimizer, tuple[list[Options], dict[Any, Any]]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are prepared."""
        return list(self._loaded)

    def add(self, optimizer: Optimizer, built: list[Options]) -> None:
        """Keep the options of an ``optimizer`` whose state has been loaded; ``built`` are those of its groups before.

        Until the epochs begin, its groups show the rates that the loop has built it with.
        """
        self._built[optimizer], self._loaded[optimizer] = built, [options_of(group) for group in optimizer.param_groups]
        for options, group in zip(built, optimizer.param_groups, strict=True):
            group.update(_scheduled(options) if self._resumes else {})

    def restore(self, prepared: Iterable[object]) -> None:
        """Set the options of the checkpoint in all optimizers, but for those that the user has changed since.

        Base rates of the schedulers among all ``prepared`` objects follow a changed learning rate. Each group keeps the
        options that it has now.
        """
        begun = {
            optimizer: [_begun(*pair) for pair in zip(built, optimizer.param_groups, strict=False)]
            for optimizer, built in self._built.items()
        }
        ratios: dict[int, float] = {}  # by the ID of the group, as an optimizer may share groups with one that it wraps
        for optimizer, groups in reversed(begun.items()):  # the wrapping one first, whose options the loop has chosen
            for options, loaded, group in zip(groups, self._loaded[optimizer], optimizer.param_groups, strict=False):
                if id(group) not in ratios:
                    group.update(_scheduled(loaded) if self._resumes else {})
                    ratios[id(group)] = _apply_changes(options, group)

        # torch's schedulers compute rates from base rates of their own, also those within another one.
        schedulers = list(prepared)
        for scheduler in schedulers:
            schedulers += getattr(scheduler, "_schedulers", ())
            optimizer = getattr(scheduler, "optimizer", None)
            groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
            of_groups = [ratios.get(id(group), 1.0) for group in groups]
            for attribute in ("base_lrs", "max_lrs"):
                rates = getattr(scheduler, attribute, None)
                if isinstance(rates, list) and len(rates) == len(of_groups):  # pyright: ignore[reportUnknownArgumentType]
                    setattr(scheduler, attribute, [rate * ratio for rate, ratio in zip(rates, of_groups, strict=True)])

    def keep_entered(self) -> None:
        """Keep copies of the options and the state of all optimizers for :meth:`restore_entered`."""
        for optimizer in self._loaded:
            options = [_copy(options_of(group)) for group in optimizer.param_groups]
            self._entered[optimizer] = options, {key: _copy(state) for key, state in optimizer.state.items()}

    def restore_entered(self) -> None:
        """Set the options and the state that were kept in all optimizers, and forget them."""
        for optimizer, (options, states) in self._entered.items():
            for before, group in zip(options, optimizer.param_groups, strict=False):  # the loop may have added groups
                _restore(group, before)
            for key, before in states.items():
                # Some optimizers keep a number of their own beside the states of the weights, which are dictionaries.
                if isinstance(before, dict) and isinstance(optimizer.state.get(key), dict):
                    _restore(optimizer.state[key], before)
                else:
                    optimizer.state[key] = before
        self._entered.clear()

    def restore_added_groups(self, optimizer: Optimizer, before: list[Options]) -> None:
        """Set the options of all groups, after those that the loop has added to ``optimizer`` have been loaded, too.

        ``before`` are the options before loading. Groups that were prepared keep them, which a scheduler may have
        changed since. Added groups get those of the checkpoint, but for what the user has changed.
        """
        num_prepared = len(self._loaded[optimizer])
        for index, (options, group) in enumerate(zip(before, optimizer.param_groups, strict=True)):
            if index < num_prepared:
                group.update({name: value for name, value in options.items() if name != "params"})
            else:
                _apply_changes(options_of(options), group)


def options_of(group: Options) -> Options:
    """Return copies of the options of an optimizer's ``group``, without its parameters or what this module adds.

    A rate that is a tensor is copied, too, because schedulers change it in place.

    Example: ``options_of(SGD(weights, lr=0.1).param_groups[0])["lr"]  # 0.1``
    """
    options = {name: value for name, value in group.items() if name not in ("params", _BEGUN)}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _scheduled(options: Options) -> Options:
    """Return those of an optimizer's ``options`` that schedules change."""
    return {name: value for name, value in options.items() if name in _SCHEDULED}


def _begun(built: Options, group: Options) -> Options:
    """Return the options with which a ``group`` begins the epochs; the loop has built it with the options ``built``.

    The rate from which a scheduler starts is the loop's: after a resume, the ``group`` has that of the checkpoint.
    """
    begun = {**built, **{name: value for name, value in _scheduled(options_of(group)).items() if name in built}}
    return {**begun, "initial_lr": built.get("initial_lr", built.get("lr"))} if "initial_lr" in group else begun


def _apply_changes(begun: Options, group: Options) -> float:
    """Set the options of a loaded ``group`` that the user has changed; return the ratio of the new rate to the old one.

    ``begun`` are the options with which the epochs of this attempt begin; they differ from those kept in the group if
    the user has changed them. Other options stay as in the checkpoint, where a scheduler may have changed them. A
    changed learning rate multiplies the rates in the group, which schedulers keep there, by the ratio of the new to the
    old one. The rate is that from which a scheduler starts, if there is one. The ratio is 1 if it is unchanged.
    """
    # Find the options that differ from those with which the first epoch of the attempt before began.
    before = group.get(_BEGUN, begun)
    changed: Options = {}
    for name, value in begun.items():
        if name in before:
            are_tensors = isinstance(before[name], torch.Tensor) and isinstance(value, torch.Tensor)
            is_same = torch.equal(before[name], value) if are_tensors else before[name] == value
            if not is_same:
                changed[name] = value

    # Multiply the rates by the ratio, unless the old rate was 0: then the new one is set as it is.
    has_scheduler = "initial_lr" in begun and "initial_lr" in before
    rate, ratio = "initial_lr" if has_scheduler else "lr", 1.0
    if rate in changed and float(before[rate]):
        ratio = float(begun[rate]) / float(before[rate])
        group.update({name: group[name] * ratio for name in _RATES if name in group})
    if ratio != 1 or has_scheduler:
        changed = {name: value for name, value in changed.items() if name not in _RATES}

    group.update(changed)
    group[_BEGUN] = begun
    return ratio


def _copy(options: Any) -> Any:
    """Return nested ``options`` or states with a copy of each tensor, because a step changes tensors in place."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, options)


def _restore(options: Options, before: Options) -> None:
    """Set ``options`` to their values ``before``: a tensor in place, because a compiled optimizer has this one."""
    for name, value in before.items():
        current = options.get(name)
        if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            options[name] = value
