"""Seeds the random number generators of torch, NumPy and Python, and those that a user's transforms hold.

Random numbers must not depend on the number of workers, nor on where a run was stopped. raytrain's own random numbers
are computed from keys (``data/plan/permutation.py``). The user's code draws from generators. These are seeded before
each step, and before each image that a user's transforms change.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from raytrain.config.user_code import is_of_user, is_users_class, variables_of
from raytrain.data.plan.permutation import mix


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of torch (of the CPU and of ``device``), NumPy and Python with ``seed``, of 64 bits.

    torch takes 63 of them, and NumPy 32. torch.manual_seed is slower, because it seeds the generators of all devices.

    Example: ``seed_generators(mix(seed, step, rank), torch.device("cpu"))``
    """
    torch.default_generator.manual_seed(seed >> 1)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed >> 1)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def used_generators(seed: int, device: torch.device) -> list[str]:
    """Return which generators were used since :func:`seed_generators` was called with the same arguments.

    They are named torch, NumPy and Python's random.
    """
    # The state of each generator is compared with the state of a new one with the same seed.
    fresh_on_cpu = torch.Generator().manual_seed(seed >> 1).get_state()
    is_torch = not torch.equal(torch.default_generator.get_state(), fresh_on_cpu)
    if device.type == "cuda" and not is_torch:
        fresh_on_gpu = torch.Generator(device).manual_seed(seed >> 1).get_state()
        is_torch = not torch.equal(torch.cuda.get_rng_state(device), fresh_on_gpu)
    seeded = np.random.RandomState(seed % 2**32).get_state(legacy=False)["state"]
    current = np.random.get_state(legacy=False)["state"]
    is_numpy = current["pos"] != seeded["pos"] or bool((current["key"] != seeded["key"]).any())
    is_python = random.getstate() != random.Random(seed).getstate()
    used = {"torch": is_torch, "NumPy": is_numpy, "Python's random": is_python}
    return [name for name, is_used in used.items() if is_used]


def state_of(generator: Any) -> str:
    """Return the state of a generator of torch, NumPy or Python as text, to compare it with a later one.

    Example: ``before = state_of(np.random.default_rng(0))``
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False))


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators that :func:`seed_generators` seeds for ``device`` after this context.

    They continue as if they had not been used or seeded in it.
    """
    # Torch restores its own generators; those of NumPy and Python get their state back here.
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_SEARCHED_IN_CLASSES = (FunctionType, *_GENERATORS)  # the members of a user's class that are looked at


def seed_each(generators: Iterable[Any], seed: int) -> None:
    """Seed each of a user's generators with a number of its own, which depends on ``seed`` and its position."""
    for position, generator in enumerate(generators):
        key = mix(seed, position)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key >> 1)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(key).state
        else:
            generator.seed(key % 2**32)


def held_generators(function: Any) -> list[Any]:
    """Return the generators that a function, an object or a list of them uses, in the order in which they are found.

    They are those of torch, NumPy and Python, but none of random.SystemRandom. They are searched in attributes of
    objects and of the user's classes, in lists and dicts, in closures, and in the global variables that functions and
    methods of the user's own files name.

    Example: ``seed_each(held_generators(transforms), mix(seed, sample))``
    """
    generators: list[Any] = []
    seen: dict[int, Any] = {}  # by id(); keeps the values alive, so that no other value gets the ID of one of them
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, random.SystemRandom):  # it has neither a state nor a seed
                continue
            # isinstance() would be slower, because it asks the metaclass of torch's generators.
            if issubclass(type(value), _GENERATORS):
                generators.append(value)
            else:
                waiting += _values_held_by(value)
    return generators


def _values_held_by(value: Any) -> list[Any]:
    """Return the objects to which ``value`` refers and which may be, or hold, a generator."""
    if isinstance(value, (list, tuple)):
        return list(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, dict):
        return list(value.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]  # pyright: ignore[reportUnknownMemberType]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    # Global variables of a library's functions are not searched, because they lead to everything that the library
    # imports. A library's functions without a closure are skipped: searching all methods of a network takes 0.1 s.
    if isinstance(value, FunctionType):
        is_users = is_of_user(value.__code__.co_filename)
        if not is_users and not value.__closure__:
            return []
        global_variables, closure_variables = variables_of(value)
        return [*closure_variables.values(), *(global_variables.values() if is_users else ())]
    if isinstance(value, type):
        members = (member for base in value.__mro__ if is_users_class(base) for member in vars(base).values())
        return [member for member in members if issubclass(type(member), _SEARCHED_IN_CLASSES)]
    if isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), type(value)]
