"""Random number generators: those of torch, NumPy and Python, and those that a user's transforms hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from raytrain.config.user_code import is_of_user, variables_of
from raytrain.data.plan.permutation import mix


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of torch (of the CPU and of ``device``), NumPy and Python.

    torch.manual_seed is slower: it seeds those of all devices.
    """
    torch.default_generator.manual_seed(seed >> 1)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed >> 1)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def used_generators(seed: int, device: torch.device) -> list[str]:
    """Whose generators have given numbers since :func:`seed_generators` got the same: torch, NumPy, Python."""
    on_cpu = torch.Generator().manual_seed(seed >> 1).get_state()
    is_torch = not torch.equal(torch.default_generator.get_state(), on_cpu)
    if device.type == "cuda" and not is_torch:
        fresh = torch.Generator(device).manual_seed(seed >> 1).get_state()
        is_torch = not torch.equal(torch.cuda.get_rng_state(device), fresh)
    numpy_is = np.random.RandomState(seed % 2**32).get_state(legacy=False)["state"]
    numpy_now = np.random.get_state(legacy=False)["state"]
    is_numpy = numpy_now["pos"] != numpy_is["pos"] or bool((numpy_now["key"] != numpy_is["key"]).any())
    is_python = random.getstate() != random.Random(seed).getstate()
    found = {"torch": is_torch, "NumPy": is_numpy, "Python's random": is_python}
    return [name for name, is_used in found.items() if is_used]


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Afterwards, the generators continue as if nobody had used or seeded them meanwhile."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_OF_CLASSES = (FunctionType, *_KINDS)


def seed_each(generators: Iterable[Any], seed: int) -> None:
    """Seed each of a user's generators with another number, which depends on ``seed`` and its place."""
    for place, generator in enumerate(generators):
        key = mix(seed, place)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key >> 1)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(key).state
        else:
            generator.seed(key % 2**32)


def held_generators(function: Any) -> list[Any]:
    """The generators that a function, an object or a list of them uses, in the order in which they are found.

    They are looked for in attributes of objects and classes, in lists and dicts, in closures, and in the global
    variables that functions and methods of the user's own files name.
    """
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            if isinstance(each, _KINDS):
                found.append(each)
            else:
                waiting += _held_by(each)
    return found


def _held_by(value: Any) -> list[Any]:
    """What one value refers to, as far as a transform may draw from it."""
    if isinstance(value, (list, tuple)):
        return list(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, dict):
        return list(value.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]  # pyright: ignore[reportUnknownMemberType]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        of_module, of_closure = variables_of(value)
        return [*of_closure.values(), *(of_module.values() if is_of_user(value.__code__.co_filename) else ())]
    if isinstance(value, type):
        return [each for base in value.__mro__ for each in vars(base).values() if isinstance(each, _OF_CLASSES)]
    if isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), type(value)]
