"""Finds networks that a loop changes but has not prepared: they are in no checkpoint, and their gradients not joined.

In many scripts, moving averages of weights, teachers and probes are such networks. A run with one seems right until it
resumes, when the network begins again. So the networks that the loop's function holds are compared before the first and
the third batch of an attempt, and before the first batch of each epoch, because some averages change once an epoch. So
are the counters that a prepared optimizer keeps in attributes and that its state_dict lacks, and what else the loop
carries from epoch to epoch (:mod:`raytrain.training.loop_checks.carried_state`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from raytrain.errors import some_of
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.exact.agreement import digest_of_tensors, has_digest
from raytrain.training.loop_checks.carried_state import CarriedState, users_frames
from raytrain.training.loop_checks.numbered_batches import epoch_number_that_decides, number_that_decides
from raytrain.training.loop_checks.searching import searching

_NOTE = (
    "the loop changes the weights of {names}, which it has not prepared: no checkpoint holds them, so a resumed run "
    "would begin with others, and their gradients are not joined over the workers; give the network to run.prepare "
    "before the first batch"
)
_COUNTER_NOTE = (
    "the steps of an optimizer change {names}, which its state_dict lacks: no checkpoint holds that, so a resumed run "
    "would begin it again; add it to state_dict and load_state_dict"
)
_CARRIED_NOTE = (
    "the loop carries {names} from epoch to epoch, which no checkpoint holds: a resumed run would begin with the first "
    "value again; give run.prepare what has state_dict and load_state_dict, or an object of your own that has it in "
    "these, as in docs/your-own-loop.md; or compute it from batch.step or epoch.number, or keep it in a buffer of a "
    "prepared network"
)
_NUMBER_NOTE = (
    "the loop decides by `{number}` how it trains, which enumerate(...), zip(...) or a counter gives with each batch; "
    "a resume enters in the middle of an epoch, where that begins anew: take batch.step % len(epoch) for the number of "
    "a batch in its epoch, or batch.step for that in the run"
)
_EPOCH_NOTE = (
    "the loop decides by `{number}` how it trains, which counts the epochs of this attempt; a resume begins with a "
    "later one, where that begins anew: take epoch.number, the number of an epoch in the run"
)
_THIRD_BATCH = 2
_LONGEST_SEARCHED = 100  # items of a list or a dictionary


class UnpreparedNetworks:
    """Reports, by ``report``, what a loop changes and ``state`` lacks: networks, counters, and what it carries on.

    Example::

        unprepared = UnpreparedNetworks(state, print)
        unprepared.look(sys._getframe(), run, is_first_of_epoch=True)  # before each batch
    """

    def __init__(self, state: CheckpointState, report: Callable[[str], None]) -> None:
        self._state, self._report = state, report
        self._num_batches = 0
        self._carried = CarriedState(state.holds_within, state.addresses)
        # Values of optimizers' counters and digests of networks' weights, at the first look at each of them.
        self._counters: dict[str, float] = {}
        self._digests: weakref.WeakKeyDictionary[nn.Module, list[list[float]]] = weakref.WeakKeyDictionary()

    def begin_epoch(self, frame: FrameType | None) -> None:
        """Note what the functions of ``frame`` may carry into the epoch that begins."""
        with searching("what the loop carries from epoch to epoch"):
            self._carried.begin_epoch(frame)

    def look(self, frame: FrameType | None, run: object, *, is_first_of_epoch: bool) -> None:
        """Before a batch, report what the loop has changed and no checkpoint holds; do nothing if no look is due.

        It looks at the networks among the variables of ``frame``, which asks for the batch, at counters of optimizers,
        at what the loop carries from epoch to epoch, and at numbers of batches and epochs by which it decides. The
        frame's variable ``run`` is left out, because it holds the prepared networks.
        """
        is_due = is_first_of_epoch or self._num_batches == _THIRD_BATCH
        self._num_batches += 1
        if not is_due:
            return
        frames = list(users_frames(frame))  # not that of a progress bar, which hands on the batches
        if not frames:
            return
        frame = frames[0]

        if self._num_batches == 1:
            with searching("by which number the loop decides"):
                self._report_numbers(frames)

        # Compare the weights that no checkpoint holds with those of the first look at their network.
        in_checkpoints = self._state.addresses()
        changed: list[str] = []
        for name, network in _networks_in(frame, run):
            tensors = [tensor for tensor in (*network.parameters(), *network.buffers()) if has_digest(tensor)]
            unprepared = [tensor for tensor in tensors if tensor.data_ptr() not in in_checkpoints]
            if not unprepared:
                continue
            digest = digest_of_tensors(unprepared).tolist()
            if digest != self._digests.setdefault(network, digest):
                changed.append(name)
        if changed:
            self._report(_NOTE.format(names=some_of(changed)))

        # The same for numbers in attributes of optimizers, and at the start of an epoch, for what the loop carries.
        if counters := self._changed_counters():
            self._report(_COUNTER_NOTE.format(names=some_of(counters)))
        with searching("what the loop carries from epoch to epoch"):
            if is_first_of_epoch and (carried := self._carried.changed(frame, run)):
                self._report(_CARRIED_NOTE.format(names=some_of(carried)))

    def _report_numbers(self, frames: Sequence[FrameType]) -> None:
        """Report numbers of batches and epochs by which the loop decides, as the texts of the functions show.

        ``frames`` are those of the user's functions, from the one that asks for a batch up to the loop.
        """
        # If a generator of the user's hands on the batches, its caller may number them.
        hands_on_batches = True
        for frame in frames:
            if hands_on_batches and (number := number_that_decides(frame)):
                self._report(_NUMBER_NOTE.format(number=number))
            hands_on_batches &= bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
            if number := epoch_number_that_decides(frame):
                self._report(_EPOCH_NOTE.format(number=number))

    def _changed_counters(self) -> list[str]:
        """Return the numbers in attributes of prepared optimizers that have changed and are in no state_dict, by name.

        An example is ``SAM.num_steps``. Attributes whose names begin with an underscore are left out.
        """
        changed: list[str] = []
        for number, optimizer in enumerate(self._state.optimizers):
            for name, value in vars(optimizer).items():
                if not isinstance(value, (int, float)) or name.startswith("_"):
                    continue
                if value != self._counters.setdefault(f"{number}.{name}", value) and name not in optimizer.state_dict():
                    changed.append(f"{type(optimizer).__name__}.{name}")
        return changed


def _networks_in(frame: FrameType, run: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks among the variables of ``frame``, in attributes of these, and in lists of both, by name.

    The name is that of the variable, such as ``teacher``, or of its attribute, such as ``ema.model``.
    """
    for name, value in frame.f_locals.items():
        if value is run or isinstance(value, (type, FunctionType, ModuleType)):
            continue
        attributes = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
        for path, held in {name: value, **{f"{name}.{key}": held for key, held in attributes.items()}}.items():
            candidates: Any = held.values() if isinstance(held, dict) else held
            if not isinstance(held, (list, tuple, dict)) or len(held) > _LONGEST_SEARCHED:
                candidates = [held]
            yield from ((path, candidate) for candidate in candidates if isinstance(candidate, nn.Module))
