"""Finds what a loop carries from epoch to epoch in its own variables: no checkpoint holds it, so a resume loses it.

The best accuracy so far, a count of steps, a queue of features, targets of single images or a moving average in a
dictionary are right as long as the run goes on, and begin again when it resumes. Two things together show them:

- The code that follows the start of an epoch reads the variable before it writes it. This is the liveness of compilers,
  computed from the bytecode: the loss of the last batch, and a sum that begins at 0 in each epoch, are written before.
- Before the first batch of a later epoch, its value is another one than before the first batch of this attempt.

Attributes of the user's objects, and global variables, count if a function reads them before it writes them, as
``self.wait += 1`` does, and tensors and lists in them if they are changed in place.
"""

from __future__ import annotations

import dis
import inspect
import math
import random
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.config.user_code import is_of_user, is_users_class
from raytrain.training.agreement import digest_of_tensors, has_digest
from raytrain.training.random_numbers import state_of

_MOST_FRAMES, _DEEPEST, _LONGEST = 12, 4, 1000  # calls up the stack, attributes of attributes, items of a list
_LARGE = 1 << 20  # numbers in an array
_CLOCKS = (time.time, time.perf_counter)
# Instructions that read and write attributes and global variables, and those after which the next is not executed.
_LOADS, _STORES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"), ("STORE_ATTR", "STORE_GLOBAL")
_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")
_CONTAINERS = (list, dict, deque, Tensor, np.ndarray)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class CarriedState:
    """Remembers the values of a loop's variables before its first epoch, and names those that it has carried on.

    ``is_kept`` returns whether a checkpoint holds a thing, and ``addresses`` those of the tensors that one holds.

    Example::

        carried = CarriedState(lambda thing: False, lambda: set())
        carried.begin_epoch(sys._getframe())
        names = carried.changed(sys._getframe(), run)  # before the first batch of the epoch
    """

    def __init__(self, is_kept: Callable[[object], bool], addresses: Callable[[], set[int]]) -> None:
        self._is_kept, self._addresses = is_kept, addresses
        self._live: dict[int, set[str]] = {}  # variables that the epoch may read before it writes them, by frame
        self._first: dict[tuple[str, int], Any] | None = None  # the values before the first batch
        self._containers: list[Any] = []  # of attributes, at the first look: no other object gets the ID of one
        self._named: set[str] = set()  # returned before
        self._attributes: set[str] | None = None  # that a function of the user's reads before it writes them
        self._searched: set[int] = set()  # IDs of the objects whose attributes this look has found
        self._began = [clock() for clock in _CLOCKS]

    def begin_epoch(self, frame: FrameType | None) -> None:
        """Note which variables the function of ``frame``, which goes over the epochs, may read in the one that begins.

        Its callers read their variables after the last epoch. If it is a generator, its caller goes over the epochs.
        """
        self._live = {}
        for each in users_frames(frame):
            self._live[id(each)] = _live(each.f_code, each.f_lasti)[0]
            if not each.f_code.co_flags & inspect.CO_GENERATOR:
                break

    def changed(self, frame: FrameType | None, run: object) -> list[str]:
        """Return names of what the loop carries on, each once; not of ``run``. ``frame`` asks for its first batch."""
        # The first look finds out which attributes carry something.
        frames = [each for each in users_frames(frame) if id(each) in self._live]
        if self._attributes is None:
            self._attributes = _carried_attributes(frames)

        # Collect what the variables of the loop and its callers hold, and then those of their modules.
        found: dict[tuple[str, int], Any] = {}
        kept = self._addresses()
        self._searched = set()
        for each in frames:
            live = self._live[id(each)]
            is_module = each.f_locals is each.f_globals  # of a script, whose variables count if an epoch reads them
            for name, value in [*each.f_locals.items()]:
                if value is not run and (name in live or not is_module):
                    found.update(self._in_value(name, value, kept, is_live=name in live))
        for namespace in {id(each.f_globals): each.f_globals for each in frames}.values():
            for name, value in [*namespace.items()]:
                if isinstance(value, ModuleType) or name in self._attributes or isinstance(value, _CONTAINERS):
                    found.update(self._in_attribute(name, name, value, kept, 0))

        # Compare it with what they held at first. A variable that did not exist before the first batch is not needed
        # then, after a resume either.
        if self._first is None:
            self._first = found
        changed = [key for key, content in found.items() if self._first.get(key, content) != content]
        new = [key[0] for key in changed if key[0] not in self._named and not self._is_time(found[key])]
        self._named.update(new)
        return new

    def _in_value(
        self, name: str, value: Any, kept: set[int], *, is_live: bool, identity: int = 0, depth: int = 0
    ) -> Iterator[tuple[tuple[str, int], Any]]:
        """Yield what ``value`` holds, and what its attributes do, by names such as ``ema.shadow``.

        ``identity`` belongs to the name: it is the ID of an object that counts only if it is changed in place.
        """
        content = _content(value, kept)
        if content is not None:
            if is_live:
                yield (name, identity), content
            return
        modules = list(value.modules()) if isinstance(value, nn.Module) else [value]
        if isinstance(value, (type, FunctionType, Optimizer, LRScheduler)) or depth == _DEEPEST:
            return
        for owner in modules:
            is_network = isinstance(owner, nn.Module)
            if id(owner) in self._searched:
                continue
            self._searched.add(id(owner))
            if not _is_users(owner) or (self._is_kept(owner) and not is_network) or _keeps_more(owner):
                continue
            for attribute, held in [*vars(owner).items()]:
                if attribute.startswith("__") or (is_network and attribute.startswith("_")):
                    continue
                yield from self._in_attribute(f"{name}.{attribute}", attribute, held, kept, depth)

    def _in_attribute(
        self, name: str, attribute: str, held: Any, kept: set[int], depth: int
    ) -> Iterator[tuple[tuple[str, int], Any]]:
        """Yield what an attribute of an object or a module, or a global variable, holds."""
        # A new tensor under an old name is mostly what an object has computed last, and carries nothing.
        assert self._attributes is not None
        is_carried, identity = attribute in self._attributes, 0
        if not is_carried and isinstance(held, _CONTAINERS) and "cache" not in attribute.lower():
            is_carried, identity = True, id(held)
            self._containers += [held] if self._first is None else []
        yield from self._in_value(name, held, kept, is_live=is_carried, identity=identity, depth=depth + 1)

    def _is_time(self, content: Any) -> bool:
        """Return whether a number is a time of this attempt, as a clock shows it."""
        if not isinstance(content, float):
            return False
        return any(began - 1 <= content <= clock() for began, clock in zip(self._began, _CLOCKS, strict=True))


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's functions from ``frame`` up to the call of the loop.

    The first frame may be that of a library that goes over the batches for the loop, such as a progress bar.

    Example: ``innermost = next(users_frames(sys._getframe()), None)``
    """
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        file = frame.f_code.co_filename
        if is_of_user(file):
            yield frame
        elif "/raytrain/training/assembly" in file.replace("\\", "/"):  # which has called the loop
            return
        frame = frame.f_back


def _content(value: Any, kept: set[int], depth: int = 0) -> Any:
    """Return something that is equal as long as ``value`` is; None for what holds no state of its own.

    Tensors that a checkpoint holds count as nothing, and so does a dictionary of numbers, mostly results by name.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return str(value)  # a NaN does not even equal itself
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if not has_digest(value):
            return "empty" if value.numel() == 0 else None
        try:
            if value.data_ptr() in kept:
                return None
            if value.is_cpu and value.numel() > _LARGE:
                return tuple(value.shape), _checksum(
                    value.detach().resolve_conj().reshape(-1).view(torch.uint8).numpy()
                )
            return tuple(value.shape), *digest_of_tensors([value])[0].tolist()
        except RuntimeError:  # torch cannot add up all kinds, such as integers of 4 bits
            return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        if value.size > _LARGE:
            return value.shape, _checksum(value)
        return value.shape, *digest_of_tensors([torch.from_numpy(np.ascontiguousarray(value, np.float64))])[0].tolist()
    if isinstance(value, _GENERATORS):
        return state_of(value)
    if isinstance(value, (list, tuple, deque, dict)) and len(value) <= _LONGEST and depth < _DEEPEST:
        items: Any = value.values() if isinstance(value, dict) else value
        contents = [_content(item, kept, depth + 1) for item in items]
        if isinstance(value, dict) and not any(isinstance(content, tuple) for content in contents):
            return None
        if contents and all(content is None for content in contents):
            return None
        return tuple(contents)
    return None


def _checksum(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of the bytes of a large array, of which sums would first make a copy in float64."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _is_users(thing: Any) -> bool:
    """Return whether ``thing`` is an object of a class of the user's, or one of the user's modules."""
    if isinstance(thing, ModuleType):
        file = getattr(thing, "__file__", None)
        return file is not None and is_of_user(file)
    return hasattr(thing, "__dict__") and is_users_class(type(thing))


def _keeps_more(thing: Any) -> bool:
    """Return whether a network says itself what else its checkpoints hold."""
    return isinstance(thing, nn.Module) and type(thing).get_extra_state is not nn.Module.get_extra_state


def _carried_attributes(frames: list[FrameType]) -> set[str]:
    """Return the names of attributes that a function in the modules of ``frames`` reads before it writes them.

    Modules of the user's that these import are searched, too.
    """
    waiting: list[Mapping[str, Any]] = [frame.f_globals for frame in frames]
    seen: set[int] = set()
    codes: dict[int, CodeType] = {id(frame.f_code): frame.f_code for frame in frames}
    while waiting:
        namespace = waiting.pop()
        if id(namespace) in seen:
            continue
        seen.add(id(namespace))
        for value in [*namespace.values()]:
            if isinstance(value, ModuleType) and _is_users(value):
                waiting.append(vars(value))
            elif isinstance(value, type) and is_users_class(value):
                methods = [each for each in vars(value).values() if _is_function(each)]
                codes.update((id(each.__code__), each.__code__) for each in methods)
                waiting += [each.__globals__ for each in methods]
            elif _is_function(value):
                codes[id(value.__code__)] = value.__code__
                waiting.append(value.__globals__)
    return {name for code in codes.values() for each in _with_inner(code) for name in _carried_in(each)}


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType) and is_of_user(value.__code__.co_filename)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _carried_in(code: CodeType) -> set[str]:
    """Return the attributes and global variables that ``code`` writes, and may read before."""
    # Most functions write none. Their bytes show it, in a hundredth of the time that their instructions take.
    if {dis.opmap[name] for name in _STORES}.isdisjoint(code.co_code[::2]):
        return set()
    instructions = list(dis.get_instructions(code))
    written = {each.argval for each in instructions if each.opname in _STORES}
    read = {each.argval for each in instructions if each.opname in _LOADS}
    return written & _live(code, 0)[1] if written & read else set()


def _live(code: CodeType, offset: int) -> tuple[set[str], set[str]]:
    """Return the variables and the attributes that ``code`` may read, from ``offset`` on, before it writes them."""
    instructions = list(dis.get_instructions(code))
    index_of = {each.offset: index for index, each in enumerate(instructions)}
    uses_and_writes = [_uses_and_writes(each) for each in instructions]
    following: list[list[int]] = []
    for index, each in enumerate(instructions):
        goes_on = not each.opname.startswith(_ENDS) and index + 1 < len(instructions)
        after = [index + 1] if goes_on else []
        if each.opcode in (*dis.hasjrel, *dis.hasjabs) and each.opname != "FOR_ITER":
            target = index_of[each.argval]
            after.append(target)
            # A loop goes round at least once: a `for` ends only from the jump back to it.
            if instructions[target].opname == "FOR_ITER" and target < index:
                after.append(index_of[instructions[target].argval])
        following.append(after)

    # What is live before an instruction is what it reads, and what is live after it and not written by it.
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    has_changed = True
    while has_changed:
        has_changed = False
        for index in range(len(instructions) - 1, -1, -1):
            uses, writes = uses_and_writes[index]
            after = frozenset[str]().union(*(live[each] for each in following[index]))
            before = uses | (after - writes)
            if before != live[index]:
                live[index], has_changed = before, True
    # A frame of Python 3.12 that waits for a generator is at the cache behind its instruction.
    index = bisect_right(instructions, max(offset, 0), key=lambda each: each.offset) - 1
    names = live[index] if instructions else frozenset()
    return {name for name in names if not name.startswith(".")}, {name[1:] for name in names if name.startswith(".")}


def _uses_and_writes(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that an instruction reads, and those that it writes.

    Those of attributes and global variables begin with a dot.
    """
    name, value = instruction.opname, instruction.argval
    if name in _LOADS:
        return frozenset([f".{value}"]), frozenset()
    if name in _STORES:
        return frozenset(), frozenset([f".{value}"])
    names = value if isinstance(value, tuple) else (value,)
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - frozenset(names[:1]), frozenset(names[:1])
    if name.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE")) and name != "LOAD_FAST_AND_CLEAR":
        return frozenset(names), frozenset()
    if name.startswith(("STORE_FAST", "STORE_NAME", "STORE_DEREF")):
        return frozenset(), frozenset(names)
    return frozenset(), frozenset()
