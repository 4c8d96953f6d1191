"""Finds what a loop carries from epoch to epoch in its own variables: no checkpoint holds it, so a resume loses it.

The best accuracy so far, a count of steps, a queue of features, targets of single images or a moving average in a
dictionary are right as long as the run goes on, and begin again when it resumes. Two things together show them:

- The code that follows the start of an epoch reads the variable before it writes it. This is the liveness of compilers,
  computed from the bytecode: the loss of the last batch, and a sum that begins at 0 in each epoch, are written before.
  Functions within the loop's may do so, too, with ``nonlocal`` variables.
- Before the first batch of a later epoch, its value is another one than before the first batch of this attempt.

Attributes of the user's objects, and global variables, count if a function reads them before it writes them, as
``self.wait += 1`` does, and tensors and lists in them if they are changed in place. So do objects of libraries that
have a state, such as torch's ``GradScaler``.
"""

from __future__ import annotations

import dis
import inspect
import math
import random
import time
import zlib
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.config.user_code import is_of_user, is_users_class
from raytrain.training.exact.agreement import digest_of_tensors, has_digest
from raytrain.training.loop_checks.reached_code import with_inner_code
from raytrain.training.loop_checks.shown_names import is_shown_counter
from raytrain.training.random_numbers import state_of

_MAX_FRAMES = 12  # up the stack
_MAX_DEPTH = 4  # attributes of attributes, lists in lists
_MAX_ITEMS = 1000  # of a list or a dictionary
_LARGE = 1 << 20  # numbers in an array
_CLOCKS = (time.time, time.perf_counter)
# Instructions that read and write attributes and global variables, and those after which the next is not executed.
_LOADS, _STORES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"), ("STORE_ATTR", "STORE_GLOBAL")
_NO_FALL_THROUGH = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")
_CONTAINERS = (list, dict, deque, Tensor, np.ndarray)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class CarriedState:
    """Remembers the values of a loop's variables before its first batch, and names those that it has carried on.

    ``is_kept`` returns whether a checkpoint holds a thing, ``addresses`` the addresses of the tensors in checkpoints.

    Example::

        carried = CarriedState(lambda thing: False, lambda: set())
        carried.begin_epoch(sys._getframe())
        names = carried.changed(sys._getframe(), run)  # before the first batch of the epoch
    """

    def __init__(self, is_kept: Callable[[object], bool], addresses: Callable[[], set[int]]) -> None:
        self._is_kept, self._addresses = is_kept, addresses
        # Variables that an epoch may read before it writes them, by the ID of their frame.
        self._live: dict[int, set[str]] = {}
        # What the variables held before the first batch, by name and identity (see _in_value).
        self._first: dict[tuple[str, int], Any] | None = None
        # Objects that may be changed in place, which the first look has met. They are kept alive, so that no other
        # object gets their IDs.
        self._held: list[Any] = []
        # Names that were returned before.
        self._named: set[str] = set()
        # Attributes and global variables that a function of the user's reads before it writes them.
        self._attributes: set[str] | None = None
        # Files with the code that was searched for them.
        self._files: set[str] = set()
        # IDs of the objects whose attributes this look has searched.
        self._searched: set[int] = set()
        # The time on each clock when this attempt began.
        self._began = [clock() for clock in _CLOCKS]

    def begin_epoch(self, frame: FrameType | None) -> None:
        """Note which variables the function of ``frame``, which asks for epochs, may read in the epoch that begins.

        Its callers read their variables only after the last epoch, when a resume has computed them anew. But if the
        function is a generator, its caller has the body of the loop over the epochs, and is noted, too.
        """
        self._live = {}
        for users_frame in users_frames(frame):
            of_itself = _live_names(users_frame.f_code, users_frame.f_lasti)[0]
            self._live[id(users_frame)] = of_itself | _carried_by_inner(users_frame.f_code, users_frame.f_lasti)
            if not users_frame.f_code.co_flags & inspect.CO_GENERATOR:
                break

    def changed(self, frame: FrameType | None, run: object) -> list[str]:
        """Return the names of what the loop carries from epoch to epoch, each name in one call only.

        ``frame`` is the one that asks for the first batch of an epoch. The first call only remembers values, to compare
        those of later calls with. A variable that holds ``run`` is left out.
        """
        # The first look finds out which attributes carry something.
        frames = [users_frame for users_frame in users_frames(frame) if id(users_frame) in self._live]
        if self._attributes is None:
            codes = _reached_code(frames)
            self._files = {code.co_filename for code in codes}
            self._attributes = {
                name for code in codes for inner in with_inner_code(code) for name in _carried_in(inner)
            }

        # Collect what the variables of the noted functions hold, and then those of their modules. If such a function is
        # a script itself, all of its module's variables are local ones: those that the epoch reads count.
        contents: dict[tuple[str, int], Any] = {}
        in_checkpoints = self._addresses()
        self._searched = set()
        for users_frame in frames:
            live = self._live[id(users_frame)]
            is_script = users_frame.f_locals is users_frame.f_globals
            for name, value in [*users_frame.f_locals.items()]:
                if value is not run and (name in live or not is_script):
                    contents.update(self._in_value(name, value, in_checkpoints, counts=name in live))
        for namespace in {id(users_frame.f_globals): users_frame.f_globals for users_frame in frames}.values():
            for name, value in [*namespace.items()]:
                is_changed_in_place = isinstance(value, _CONTAINERS) or _has_state(value)
                if isinstance(value, ModuleType) or name in self._attributes or is_changed_in_place:
                    contents.update(self._in_attribute(name, name, value, in_checkpoints, 0))

        # Compare it with what they held at first. A variable that did not exist before the first batch of this attempt
        # is left out: a resumed attempt will not need it before its first batch either.
        if self._first is None:
            self._first = contents
        changed = [key for key, content in contents.items() if self._first.get(key, content) != content]
        new = {key[0]: contents[key] for key in changed if key[0] not in self._named}
        self._named.update(new)
        return [name for name, content in new.items() if not self._is_harmless(name, content, frames)]

    def _in_value(
        self, name: str, value: Any, in_checkpoints: set[int], *, counts: bool, identity: int = 0, depth: int = 0
    ) -> Iterator[tuple[tuple[str, int], Any]]:
        """Yield the content of ``value`` if it ``counts``; if it has none, what its attributes hold.

        Contents come by name, such as ``ema.shadow``, and ``identity``: the ID of an object that counts only if it is
        changed in place, otherwise 0. ``depth`` is the number of attributes that have led to it.
        """
        content = _content(value, in_checkpoints)
        if content is not None:
            if counts:
                yield (name, identity), content
            return
        if _has_state(value):
            if not self._is_kept(value):
                self._held += [value] if self._first is None else []
                state = value.state_dict()
                yield (name, id(value)), tuple(_content(part, in_checkpoints) for part in state.values())
            return
        if isinstance(value, (type, FunctionType, Optimizer, LRScheduler)) or depth == _MAX_DEPTH:
            return

        # Search the attributes of a network's layers, too, also of a prepared one: a checkpoint has its weights and
        # buffers only, unless it says itself what else is in its state. Other prepared objects are in it whole.
        for owner in value.modules() if isinstance(value, nn.Module) else [value]:
            is_network = isinstance(owner, nn.Module)
            if id(owner) in self._searched:
                continue
            self._searched.add(id(owner))
            if not _is_users(owner) or (self._is_kept(owner) and not is_network) or _has_extra_state(owner):
                continue
            for attribute, held in [*vars(owner).items()]:
                is_of_python_or_torch = attribute.startswith("__") or (is_network and attribute.startswith("_"))
                if not is_of_python_or_torch:
                    yield from self._in_attribute(f"{name}.{attribute}", attribute, held, in_checkpoints, depth)

    def _in_attribute(
        self, name: str, attribute: str, held: Any, in_checkpoints: set[int], depth: int
    ) -> Iterator[tuple[tuple[str, int], Any]]:
        """Yield what an attribute of an object or a module, or a global variable, holds, as :meth:`_in_value` does.

        ``name`` is its whole name, ``attribute`` the last part of it, ``held`` the value.
        """
        # A container counts if it is changed in place, even if no code that was searched reads and writes the
        # attribute. A new tensor under an old name is mostly what an object has computed last, and carries nothing.
        assert self._attributes is not None
        is_carried, identity = attribute in self._attributes, 0
        if not is_carried and isinstance(held, _CONTAINERS) and "cache" not in attribute.lower():
            is_carried, identity = True, id(held)
            self._held += [held] if self._first is None else []
        yield from self._in_value(name, held, in_checkpoints, counts=is_carried, identity=identity, depth=depth + 1)

    def _is_harmless(self, name: str, content: Any, frames: list[FrameType]) -> bool:
        """Return whether a resume may begin a number anew: a time of this attempt, or a counter that is only shown."""
        if isinstance(content, float):
            return any(began - 1 <= content <= clock() for began, clock in zip(self._began, _CLOCKS, strict=True))
        if not isinstance(content, int):
            return False
        for frame in frames:
            if name in frame.f_locals and frame.f_locals is not frame.f_globals:
                return is_shown_counter(name, [frame.f_code.co_filename], frame.f_lineno)
        return is_shown_counter(name, self._files)


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's functions from ``frame`` up to the call of the loop, at most 12 calls up.

    Frames of libraries are left out, such as that of a progress bar, which goes over the batches for the loop.

    Example: ``innermost = next(users_frames(sys._getframe()), None)``
    """
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        file = frame.f_code.co_filename
        if is_of_user(file):
            yield frame
        elif "/raytrain/training/assembly" in file.replace("\\", "/"):  # which has called the loop
            return
        frame = frame.f_back


def _content(value: Any, in_checkpoints: set[int], depth: int = 0) -> Any:
    """Return something that is equal as long as ``value`` is; None for what holds no state of its own.

    These are objects of other kinds, lists and dictionaries of more than 1,000 items, tensors whose addresses are
    ``in_checkpoints``, and dictionaries of plain values, which are mostly results by name.
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
            if value.data_ptr() in in_checkpoints:
                return None
            if value.is_cpu and value.numel() > _LARGE:
                as_bytes = value.detach().resolve_conj().reshape(-1).view(torch.uint8).numpy()
                return tuple(value.shape), _checksum(as_bytes)
            return tuple(value.shape), *digest_of_tensors([value])[0].tolist()
        except RuntimeError:  # torch cannot add up all kinds, such as integers of 4 bits
            return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        if value.size > _LARGE:
            return value.shape, _checksum(value)
        return value.shape, *digest_of_tensors([torch.from_numpy(np.ascontiguousarray(value, np.float64))])[0].tolist()
    if isinstance(value, _GENERATORS):
        return state_of(value)
    if isinstance(value, (list, tuple, deque, dict)) and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH:
        items: Any = value.values() if isinstance(value, dict) else value
        if isinstance(value, defaultdict):  # reading a name adds an empty container
            items = [item for item in items if not isinstance(item, (list, dict, deque)) or item]
        contents = [_content(item, in_checkpoints, depth + 1) for item in items]
        # The content of a tensor, an array or a list is a tuple: a dictionary without one has only plain values.
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


def _has_state(thing: Any) -> bool:
    """Return whether ``thing`` is an object of a library whose state can be kept, but no network, which has buffers."""
    if isinstance(thing, (type, nn.Module, Optimizer, LRScheduler)) or is_users_class(type(thing)):
        return False
    return all(callable(getattr(type(thing), method, None)) for method in ("state_dict", "load_state_dict"))


def _has_extra_state(thing: Any) -> bool:
    """Return whether a network has a ``get_extra_state`` of its own, which puts more than tensors into checkpoints."""
    return isinstance(thing, nn.Module) and type(thing).get_extra_state is not nn.Module.get_extra_state


def _reached_code(frames: list[FrameType]) -> list[CodeType]:
    """Return the code of all functions and methods of the user's that ``frames`` may reach.

    These are in the modules of ``frames``, in modules of the user's that these import, and in the modules that imported
    functions come from.
    """
    namespaces: list[Mapping[str, Any]] = [frame.f_globals for frame in frames]  # still to be searched
    seen: set[int] = set()
    codes: dict[int, CodeType] = {id(frame.f_code): frame.f_code for frame in frames}
    while namespaces:
        namespace = namespaces.pop()
        if id(namespace) in seen:
            continue
        seen.add(id(namespace))
        for value in [*namespace.values()]:
            if isinstance(value, ModuleType) and _is_users(value):
                namespaces.append(vars(value))
            elif isinstance(value, type) and is_users_class(value):
                methods = [member for member in vars(value).values() if _is_users_function(member)]
                codes.update((id(method.__code__), method.__code__) for method in methods)
                namespaces += [method.__globals__ for method in methods]
            elif _is_users_function(value):
                codes[id(value.__code__)] = value.__code__
                namespaces.append(value.__globals__)
    return list(codes.values())


def _is_users_function(value: object) -> bool:
    return isinstance(value, FunctionType) and is_of_user(value.__code__.co_filename)


def _carried_by_inner(code: CodeType, offset: int) -> set[str]:
    """Return the variables of ``code`` that functions within it write, as ``nonlocal`` ones, and may read before.

    Left out are those that ``code`` itself writes after the instruction at ``offset`` bytes, such as a sum that begins
    at 0 in each epoch.
    """
    carried: set[str] = set()
    for inner in with_inner_code(code):
        if inner is not code and inner.co_freevars:
            instructions = dis.get_instructions(inner)
            stored = {instruction.argval for instruction in instructions if instruction.opname == "STORE_DEREF"}
            carried |= stored.intersection(inner.co_freevars, _live_names(inner, 0)[0])
    if not carried:
        return carried
    later = (instruction for instruction in dis.get_instructions(code) if instruction.offset > offset)
    return carried - {instruction.argval for instruction in later if instruction.opname == "STORE_DEREF"}


def _carried_in(code: CodeType) -> set[str]:
    """Return the attributes and global variables that ``code`` writes, and may read before."""
    # Most functions write none. Their bytes show it, in a hundredth of the time that their instructions take: every
    # second byte is the number of an instruction.
    if {dis.opmap[name] for name in _STORES}.isdisjoint(code.co_code[::2]):
        return set()
    instructions = list(dis.get_instructions(code))
    written = {instruction.argval for instruction in instructions if instruction.opname in _STORES}
    read = {instruction.argval for instruction in instructions if instruction.opname in _LOADS}
    return written & _live_names(code, 0)[1] if written & read else set()


def _live_names(code: CodeType, offset: int) -> tuple[set[str], set[str]]:
    """Return what ``code`` may read before it writes it, from the instruction at ``offset`` bytes on.

    The first set has local variables, the second one attributes and global variables.
    """
    # Find, by index, the instructions that may be executed after each one: the next one, and the target of a jump.
    # In long functions, instructions whose numbers need more than a byte have prefixes, EXTENDED_ARG. A jump to such an
    # instruction leads to its first prefix, so that has the index of the instruction.
    instructions: list[dis.Instruction] = []
    index_at: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        index_at[instruction.offset] = len(instructions)
        if instruction.opname != "EXTENDED_ARG":
            instructions.append(instruction)
    reads_and_writes = [_reads_and_writes(instruction) for instruction in instructions]
    successors: list[list[int]] = []
    for index, instruction in enumerate(instructions):
        goes_on = not instruction.opname.startswith(_NO_FALL_THROUGH) and index + 1 < len(instructions)
        indices = [index + 1] if goes_on else []
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs) and instruction.opname != "FOR_ITER":
            target = index_at[instruction.argval]
            indices.append(target)
            # Every `for` is taken to go round at least once: it ends only from the jump back to it, not when it begins.
            # Otherwise all that a loop over the batches writes would seem to be read, after it, from the epoch before.
            if instructions[target].opname == "FOR_ITER" and target < index:
                indices.append(index_at[instructions[target].argval])
        successors.append(indices)

    # What is live before an instruction is what it reads, and what is live after it and not written by it. Repeat this
    # from the last instruction to the first until it changes nothing more, because loops jump back.
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    has_changed = True
    while has_changed:
        has_changed = False
        for index in range(len(instructions) - 1, -1, -1):
            reads, writes = reads_and_writes[index]
            live_after = frozenset[str]().union(*(live[successor] for successor in successors[index]))
            live_before = reads | (live_after - writes)
            if live_before != live[index]:
                live[index], has_changed = live_before, True

    # Take the last instruction that begins at or before the offset. A frame of Python 3.12 that waits for a generator
    # is at the cache behind its instruction.
    index = bisect_right(instructions, max(offset, 0), key=lambda instruction: instruction.offset) - 1
    names = live[index] if instructions else frozenset()
    return {name for name in names if not name.startswith(".")}, {name[1:] for name in names if name.startswith(".")}


def _reads_and_writes(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that an instruction reads, and those that it writes.

    Names of attributes and global variables begin with a dot, those of local variables do not.
    """
    name, value = instruction.opname, instruction.argval
    if name in _LOADS:
        return frozenset([f".{value}"]), frozenset()
    if name in _STORES:
        return frozenset(), frozenset([f".{value}"])
    # Since Python 3.13, one instruction may load or store two variables. This one stores the first and loads the other.
    names = value if isinstance(value, tuple) else (value,)
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - frozenset(names[:1]), frozenset(names[:1])
    if name.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE")) and name != "LOAD_FAST_AND_CLEAR":
        return frozenset(names), frozenset()
    if name.startswith(("STORE_FAST", "STORE_NAME", "STORE_DEREF")):
        return frozenset(), frozenset(names)
    return frozenset(), frozenset()
