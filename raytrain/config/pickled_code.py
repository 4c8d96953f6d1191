"""The user's code, pickled for workers and for processes that a loop starts itself, such as those of a DataLoader.

A run pickles its loop and other functions of the user's by :func:`pickle_own_code`, for workers that may have none of
their files. What a loop sends to processes of its own, ``multiprocessing`` pickles as the name of a module, and a name
in it. A process that is started by ``spawn`` or ``forkserver`` (Python's choice since 3.14) imports the module, which
it can't if the module is

- a file that an option names: it is imported under an invented name (``raytrain.config.named_functions``);
- one that does not exist on the worker: a loop travels by value to a Ray cluster, and so does one that is in the
  user's script or notebook.

After :func:`send_own_code`, a module of the first kind is imported from its file there, too. Classes and functions of
the second kind are sent by value, as cloudpickle does. What such a process sends back is found in the same ways.
"""

from __future__ import annotations

import importlib
import io
import operator
import pickle
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from raytrain.config.named_functions import import_missing_files, own_file, own_files
from raytrain.config.user_code import describe, variables_of
from raytrain.errors import UsageError


def check_loop(loop: object) -> None:
    """Raise UsageError if ``loop`` is no function, or one that cannot be sent to the workers."""
    if isinstance(loop, type) or not callable(loop):
        kind = f"the class {loop.__name__}" if isinstance(loop, type) else f"of type {type(loop).__name__}"
        raise UsageError(
            f"The loop is {kind}; give a function of one argument, the run, or name one in the options, as in "
            'TrainConfig(loop="file.py:function").'
        )
    with sending({"The loop": loop}):
        pickle_own_code(loop)


@contextmanager
def sending(functions: Mapping[str, object]) -> Generator[None]:
    """Make a UsageError of an exception that pickling ``functions`` raises, with the variables that cause it.

    ``functions`` are the user's own, by the names that the sentence gives them; None for one that is not given.

    Example: ``with sending({"The loop": loop}): pickle_own_code(loop)``
    """
    try:
        yield
    except Exception as error:
        # Pickle does not say which variable holds the value that it refuses: so try each variable by itself.
        culprits: dict[str, list[str]] = {}  # names of such variables, by function
        for name, function in functions.items():
            if function is not None:
                of_module, of_closure = variables_of(function)
                variables = {**of_module, **of_closure}
                culprits[name] = [variable for variable in variables if not _can_be_pickled(variables[variable])]

        # The sentence is about one function, that with the most of them. No variable may be found, as if the function
        # itself is an object that pickle refuses.
        name, refused = max(culprits.items(), key=lambda culprit: len(culprit[1]))
        shown = ", ".join(f"`{variable}`" for variable in refused) or "what is used there"
        are, them = ("are", "them") if len(refused) > 1 else ("is", "it")
        raise UsageError(
            f"{name} cannot be sent to the workers, because of {shown}, which {are} of this process alone "
            f"({describe(error)}); make {them} inside the function."
        ) from None


def pickle_own_code(value: object) -> bytes:
    """Return ``value``, which may hold functions of the user's, pickled for another process.

    Example: ``loop = pickle.loads(pickle_own_code(loop))``
    """
    file = io.BytesIO()
    _OwnCodePickler(file).dump(value)  # pyright: ignore[reportUnknownMemberType]
    return file.getvalue()


class _OwnCodePickler(cloudpickle.Pickler):
    """Pickles like cloudpickle, but functions keep the names of their files, so that errors can name a line."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the function and the arguments that rebuild ``obj``, or NotImplemented; pickle calls this."""
        # cloudpickle replaces the name of a function's file by <dynamic-code>.
        if isinstance(obj, CodeType):
            make, arguments = cast(Any, cloudpickle.Pickler.dispatch_table)[CodeType](obj)
            return _code_of_file, (make, arguments, obj.co_filename)
        # torch.classes is of a subclass of ModuleType, which cloudpickle cannot pickle. It is taken along with a loop
        # that names both torch and an attribute called classes, such as run.classes.
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return cast(Any, super()).reducer_override(obj)


def _code_of_file(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _can_be_pickled(value: object) -> bool:
    """Return True if ``value`` can be sent to the workers."""
    try:
        pickle_own_code(value)
    except Exception:
        return False
    return True


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
