"""Pickles the user's modules by value, so that the nodes of a cluster need no copy of them."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path

import ray

import raytrain


def pickle_by_value(function: Callable[..., object] | None) -> None:
    """Have the module that a function of the user's is defined in travel with it."""
    module = inspect.getmodule(getattr(function, "func", function))
    if module is None or module.__name__ == "__main__" or not (file := getattr(module, "__file__", None)):
        return  # pickled by value anyway
    installed = (*set(sysconfig.get_paths().values()), *raytrain.__path__)
    if not any(Path(file).is_relative_to(folder) for folder in installed):
        ray.cloudpickle.register_pickle_by_value(module)  # pyright: ignore
