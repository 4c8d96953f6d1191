"""The user's classes and functions in processes that a loop starts itself, such as those of a DataLoader.

``multiprocessing`` pickles a class or a function as the name of its module, and its own name there. A process that is
started by ``spawn`` or ``forkserver`` (Python's choice since 3.14) imports the module, which it can't if the module is

- a file that an option names: it is imported under an invented name (``raytrain.config.user_code``);
- one that does not exist on the worker: a loop travels by value to a Ray cluster, and so does one that is in the
  user's script or notebook.

A module of the first kind is imported from its file there, too. Classes and functions of the second kind are sent by
value, as cloudpickle does. What such a process sends back is found in the same ways.
"""

from __future__ import annotations

import operator
import pickle
import sys
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, cast

from raytrain.config.user_code import import_missing_files, own_file, own_files, pickle_own_code


def send_own_code() -> None:
    """Let processes that this one starts from now on rebuild the user's classes and functions which they cannot import.

    It changes how this process pickles for ``multiprocessing``, and the processes that it starts do the same.

    Example:
        >>> send_own_code()
        >>> DataLoader(OwnDataset(), num_workers=2, multiprocessing_context="spawn")
    """
    # Not ForkingPickler.register: a pickler asks the registered functions about instances of a class, but never about
    # the class or a function itself. It asks reducer_override about every object, first.
    cast(Any, ForkingPickler).reducer_override = _reduce


def _reduce(pickler: ForkingPickler, value: object) -> Any:
    """Return the function and the arguments that rebuild ``value`` elsewhere; NotImplemented to pickle it as usual."""
    if not isinstance(value, (type, FunctionType)):
        return NotImplemented

    # The other process would look it up by the names of its module and its own. If these do not lead to it even here,
    # as for a loop that came to this process by value, it is sent by value.
    object_of_that_name = None
    with suppress(AttributeError):
        object_of_that_name = operator.attrgetter(value.__qualname__)(sys.modules.get(value.__module__))
    if object_of_that_name is not value:
        return _from_value, (pickle_own_code(value), own_files())

    # The module of a file that an option names has an invented name: the other process imports it from the file.
    if (path := own_file(value.__module__)) is not None:
        return _from_file, (value.__module__, path, value.__qualname__)

    # The other process can import any other module by its name.
    return NotImplemented


def _from_file(module: str, path: str, name: str) -> Any:
    """Import the file ``path`` as ``module``, its name in the sending process, and return its object ``name``."""
    _import_files({module: path})
    return operator.attrgetter(name)(sys.modules[module])


def _from_value(pickled: bytes, files: dict[str, str]) -> Any:
    """Return the value in ``pickled``, which may refer to the user's ``files``, paths by the names of their modules."""
    _import_files(files)
    return pickle.loads(pickled)


def _import_files(files: dict[str, str]) -> None:
    """Import the user's ``files`` that are not imported yet, and let this process send own code on in the same way."""
    send_own_code()
    import_missing_files(files)
