"""Variables of this process that Ray reads, also if it has been imported already."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from raytrain.launch.ray.private_api import LATE_VARIABLES, read_variables

LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this, Ray uses 127.0.0.1 as the node's address, as it does by default on macOS, and listens nowhere else.
Whoever joins such a cluster needs it, too, while it joins; it may join a cluster of several machines afterwards."""


def in_ray() -> bool:
    """Return whether this process is in a Ray cluster, without importing Ray.

    Another thread may still be importing it: ``sys.modules`` then has a module without this function, and nobody can
    have joined a cluster.
    """
    return getattr(sys.modules.get("ray"), "is_initialized", bool)()


def loopback_environment() -> dict[str, str]:
    """Return the variables of a cluster on the loopback interface, if they have an effect in this process."""
    return LOOPBACK_ENVIRONMENT if "ray" not in sys.modules or LATE_VARIABLES.find() else {}


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Give this process these variables, which Ray sees, too, during the ``with`` block; then those of before."""
    before = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)  # Ray may have removed it
        set_variables({name: value for name, value in before.items() if value is not None})


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, so that Ray sees them, too, if it has been imported already."""
    os.environ.update(variables)
    if "ray" in sys.modules:
        importlib.import_module("ray")  # waits if another thread is still importing it
        read_variables()
