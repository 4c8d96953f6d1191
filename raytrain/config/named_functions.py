"""Functions of the user's that options name, as in ``--loop file.py:function``: checks and imports them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from raytrain.config.network import timm_name
from raytrain.config.user_code import in_one_sentence, is_of_user, users_line
from raytrain.errors import UsageError, did_you_mean, flag

_RAYTRAINS_NETWORKS = "raytrain.models"
_OWN_MODULE = "raytrain_own_"  # begins the names of modules imported from files, so that they hide no others
_importing = threading.local()  # whose attribute program is what this thread imports at present
_imported: dict[str, tuple[str, int, int]] = {}  # path, time (ns) and size (bytes) of the imported files, by module


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Import the function that ``option`` names as ``package.module:function`` or ``file.py:function``.

    Raises UsageError if there is none, with what is missing, or if the user's module cannot be imported.

    Example: ``load_function("--loop", "my_loop.py:train")``
    """
    # Import the module. An exception in it is a mistake of the user's, and becomes one sentence.
    place, _, function_name = name.rpartition(":")
    if not place or place.endswith(":"):  # as in file.py::function
        raise _names_no_function(option, name)
    with in_one_sentence(f"{option} {name} cannot be imported"):
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise _no_file(option, Path(place))
            module = import_own_file(place)
        else:
            try:
                with _as_program(place):
                    module = importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                    raise  # the module exists, but something that it imports does not
                raise _no_module(option, name, error.name) from None

    # Take the function from it.
    function = getattr(module, function_name, None)
    if function is None:
        raise no_function(option, name, dir(module))
    if not callable(function):
        raise UsageError(
            f"{option} {name}: {function_name} in {place} is of type {type(function).__name__}, no function."
        )
    return function


def load_optional(option: str, name: str | None) -> Callable[..., Any] | None:
    """Import the function that ``option`` names; None if it names none. Raises as :func:`load_function` does."""
    return None if name is None else load_function(option, name)


def file_of_function(name: str) -> Path | None:
    """Return the file of the user's function ``name``; None if its module is not found, or is a library's.

    Nothing is imported, and the file of a name such as "my_loop.py:train" need not exist.

    Example: ``file_of_function("my_loop.py:train") == Path("my_loop.py")``
    """
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    spec, _ = _find_module(module)
    file = getattr(spec, "has_location", False) and spec.origin
    return Path(file) if file and is_of_user(file) else None


def _find_module(module: str) -> tuple[Any, str]:
    """Return the spec of a ``module``, and "", or None and its name up to the part behind a dot that is missing.

    Nothing is imported. A module that is imported already counts as found, whatever its spec.
    """
    package, *inner = module.split(".")
    spec, name = find_spec(package) if package else None, package
    for part in inner:
        if spec is None:
            break
        folders = getattr(spec, "submodule_search_locations", None)
        spec, name = PathFinder.find_spec(part, list(folders)) if folders else None, f"{name}.{part}"
    return spec, "" if spec is not None or module in sys.modules else name


def find_spec(package: str, *folders: str) -> Any:
    """Return the spec of an installed ``package``, or of one in these ``folders``; None if it is not there.

    For a package that is imported already and has no spec, return its name.

    Example: ``find_spec("torch") is not None``
    """
    with suppress(ValueError, ImportError):
        return importlib.util.find_spec(package) or PathFinder.find_spec(package, list(folders))
    return package


def no_function(option: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a function ``name`` whose file or module has only the ``known`` names."""
    place, _, function = name.rpartition(":")
    return UsageError(f"{option} {name}: {place} has no function {function!r}{did_you_mean(function, known)}.")


def import_own_file(path: str | Path) -> ModuleType:
    """Import a file of the user's, which may itself import files beside it.

    As with a usual import, its code runs once in a process, and again only if the file has changed since.
    """
    file = Path(path).resolve()
    name = f"{_OWN_MODULE}{file.stem}"
    status = file.stat()
    version = str(file), status.st_mtime_ns, status.st_size
    if name in sys.modules and _imported.get(name) == version:
        return sys.modules[name]

    # The module is known by its name before its code runs, as with a usual import: dataclasses and pickle look it up.
    _imported.pop(name, None)  # until this import has succeeded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)

    # The folder stays in sys.path, because the user's functions may import more files when they are called.
    sys.path.insert(0, str(file.parent))
    with _as_program(str(file)):
        spec.loader.exec_module(module)
    _imported[name] = version
    return module


@contextmanager
def _as_program(program: str) -> Generator[None]:
    """Let sys.argv hold ``program`` alone while a module of the user's is imported: its arguments are raytrain's.

    Raises UsageError if the module exits, as argparse does if it lacks a required argument.
    """
    arguments_of_raytrain, sys.argv = sys.argv, [program]
    outer = getattr(_importing, "program", None)
    _importing.program = program
    try:
        yield
    except SystemExit as error:
        line = users_line(traceback.extract_tb(error.__traceback__))
        raise UsageError(
            f"{os.path.basename(program)} exits when it is imported for its functions{f' ({line})' if line else ''}; "
            'put what reads arguments or exits below `if __name__ == "__main__":`.'
        ) from error
    finally:
        sys.argv = arguments_of_raytrain
        _importing.program = outer


def check_not_importing() -> None:
    """Raise UsageError if the code that calls this runs because raytrain imports a module of the user's.

    A script that trains at its end would otherwise start a run in each worker that imports its loop.
    """
    if program := getattr(_importing, "program", None):
        raise UsageError(
            f"{os.path.basename(program)} starts a run when it is imported for its functions; put that call below "
            '`if __name__ == "__main__":`.'
        )


def own_files() -> dict[str, str]:
    """Return the paths of the files that this process has imported by their paths, by the names of their modules.

    Files that were removed since then are left out, because other processes cannot import them.
    """
    # A copy of the names, because another thread may be importing.
    return {name: file for name in [*sys.modules] if (file := own_file(name)) and os.path.isfile(file)}


def own_file(module: str) -> str | None:
    """Return the file of a ``module`` that this process has imported by its path; None for any other module."""
    return getattr(sys.modules.get(module), "__file__", None) if module.startswith(_OWN_MODULE) else None


def import_missing_files(files: Mapping[str, str]) -> None:
    """Import those of the user's ``files``, from :func:`own_files` in another process, that are not imported here."""
    for module, path in files.items():
        if module not in sys.modules:
            import_own_file(path)


def check_module(option: str, name: str) -> None:
    """Raise UsageError if ``name`` has not the form of a function's name, or its file or module is missing.

    It imports nothing, so a function that is missing in an existing file or module is not noticed.

    Example: ``check_module("--loop", "my_loop.py:train")``
    """
    place = name.rpartition(":")[0]
    if not place or place.endswith(":"):  # as in file.py::function
        raise _names_no_function(option, name)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise _no_file(option, Path(place))
        return
    missing = _find_module(place)[1]
    if missing and Path(place).is_file():
        raise UsageError(f"{option} {name}: {place} is no file of Python, whose name ends in .py.")
    if missing and Path(f"{place}.py").is_file():
        raise UsageError(f"{option} {name} names no function; write {place}.py:{name.rpartition(':')[2]}.")
    if missing:
        raise _no_module(option, name, missing)


def names_own_function(name: str | None) -> bool:
    """Return True if ``name``, a value of ``--model``, is a function of the user's: not raytrain's, nor a library's.

    Example: ``names_own_function("my_loop.py:train") and not names_own_function("resnet18")``
    """
    if name is None or ":" not in name or timm_name(name) is not None:
        return False
    return name.rpartition(":")[0] != _RAYTRAINS_NETWORKS


def stored_function_error(option: str, name: str, document: str, *, may_be_named: bool) -> UsageError:
    """Return the error for a function that only ``document`` names, so that it must not run without the user's consent.

    ``may_be_named``: the command has the same option, so the user may name the function there instead.
    """
    place, _, function = name.rpartition(":")
    name_it = f"give {flag(option)} {name} in this command, or " if may_be_named else ""
    return UsageError(
        f"{document} names {flag(option)} {name}, so this would run the function {function} of {place}; if you trust "
        f"whoever wrote it, {name_it}add --trust (in Python trust=True)."
    )


def _no_module(option: str, name: str, module: str) -> UsageError:
    return UsageError(f"{option} {name}: there is no module {module}; is its folder the current one or on PYTHONPATH?")


def _no_file(option: str, path: Path) -> UsageError:
    return UsageError(f"{option}: there is no file {path}; its path is relative to the current folder.")


def _names_no_function(option: str, name: str) -> UsageError:
    return UsageError(f"{option} {name} names no function; write package.module:function or file.py:function.")
