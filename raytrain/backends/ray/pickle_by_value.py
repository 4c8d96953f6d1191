"""Functions of the user's on their way to the machines of a cluster, which do not have the files that they stand in."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path

import ray


def pickle_by_value(loop: Callable[..., None] | None) -> None:
    """Have a loop of the user's travel with the module that it stands in."""
    module = inspect.getmodule(getattr(loop, "func", loop))
    if module is None or module.__name__ == "__main__" or not (file := getattr(module, "__file__", None)):
        return  # travels by value anyway
    if not any(Path(file).is_relative_to(place) for place in (*set(sysconfig.get_paths().values()), Path(__file__).parent)):
        ray.cloudpickle.register_pickle_by_value(module)  # pyright: ignore
