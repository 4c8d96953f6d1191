"""The user's own code: functions that options name, and an exception in them as one sentence with the line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from raytrain.config.network import timm_name
from raytrain.errors import RaytrainError, UsageError, did_you_mean, file_title, flag

_RAYTRAINS_NETWORKS = "raytrain.models"
_PACKAGE = os.path.join(Path(__file__).parents[1], "")  # with a slash: raytrain_loops/ beside it is the user's
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MAX_LINE_CHARS = 120  # of a line of code that an error shows
_NOT_TRANSIENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Import the function that ``option`` names as ``package.module:function`` or ``file.py:function``.

    Raises UsageError if there is none, with what is missing, or if the user's module cannot be imported.

    Example: ``load_function("--loop", "my_loop.py:train")``
    """
    # Import the module. An exception in it is a mistake of the user's, and becomes one sentence.
    place, _, function_name = name.rpartition(":")
    if not place:
        raise _names_no_function(option, name)
    with in_one_sentence(f"{option} {name} cannot be imported"):
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise _no_file(option, Path(place))
            module = import_own_file(place)
        else:
            try:
                with _without_arguments(place):
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


_OWN_MODULE = "raytrain_own_"  # begins the names of modules imported from files, so that they hide no others
_imported: dict[str, tuple[str, int, int]] = {}  # path, time (ns) and size (bytes) of the imported files, by module


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
    with _without_arguments(str(file)):
        spec.loader.exec_module(module)
    _imported[name] = version
    return module


@contextmanager
def _without_arguments(program: str) -> Generator[None]:
    """Let sys.argv hold ``program`` alone while a module of the user's is imported: its arguments are raytrain's."""
    arguments_of_raytrain, sys.argv = sys.argv, [program]
    try:
        yield
    finally:
        sys.argv = arguments_of_raytrain


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
    """Import the user's ``files``, those of :func:`own_files` in another process, that this one has not imported."""
    for module, path in files.items():
        if module not in sys.modules:
            import_own_file(path)


def no_function(option: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a function ``name`` whose file or module has only the ``known`` names."""
    place, _, function = name.rpartition(":")
    return UsageError(f"{option} {name}: {place} has no function {function!r}{did_you_mean(function, known)}.")


def _no_module(option: str, name: str, module: str) -> UsageError:
    return UsageError(f"{option} {name}: there is no module {module}; is its folder the current one or on PYTHONPATH?")


def _no_file(option: str, path: Path) -> UsageError:
    return UsageError(f"{option}: there is no file {path}; its path is relative to the current folder.")


def load_optional(option: str, name: str | None) -> Callable[..., Any] | None:
    """Import the function that ``option`` names; None if it names none. Raises as :func:`load_function` does."""
    return None if name is None else load_function(option, name)


def check_module(option: str, name: str) -> None:
    """Raise UsageError if ``name`` has not the form of a function's name, or its file or outermost package is missing.

    It imports nothing, so a function that is missing in an existing file or package is not noticed.

    Example: ``check_module("--loop", "my_loop.py:train")``
    """
    place = name.rpartition(":")[0]
    if not place:
        raise _names_no_function(option, name)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise _no_file(option, Path(place))
        return
    package = place.partition(".")[0]
    if package and package not in sys.modules and importlib.util.find_spec(package) is None:
        raise _no_module(option, name, package)


def _names_no_function(option: str, name: str) -> UsageError:
    return UsageError(f"{option} {name} names no function; write package.module:function or file.py:function.")


def file_of_function(name: str) -> Path | None:
    """Return the file of the user's function ``name``; None if its module is not found, or is a library's.

    Nothing is imported, and the file of a name such as "my_loop.py:train" need not exist.

    Example: ``file_of_function("my_loop.py:train") == Path("my_loop.py")``
    """
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    package, *inner = module.split(".")
    spec = find_spec(package)
    for part in inner:
        folders = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    file = spec and spec.has_location and spec.origin
    return Path(file) if file and is_of_user(file) else None


def find_spec(package: str, *folders: str) -> Any:
    """Return the spec of an installed ``package``, or of one in these ``folders``; None if it is not there.

    A package that is imported already, in a way that has left it no spec, gives its name in place of one.

    Example: ``find_spec("torch") is not None``
    """
    with suppress(ValueError, ImportError):
        return importlib.util.find_spec(package) or PathFinder.find_spec(package, list(folders))
    return package


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


def variables_of(function: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the global variables that a function names, and of those in its closure, each by name.

    Both are empty if ``function`` is no plain function, or a variable of its closure has no value yet.
    """
    with suppress(TypeError, ValueError):
        used = inspect.getclosurevars(cast(Any, function))
        return dict(used.globals), dict(used.nonlocals)
    return {}, {}


def _can_be_pickled(value: object) -> bool:
    """Return True if ``value`` can be sent to the workers."""
    try:
        pickle_own_code(value)
    except Exception:
        return False
    return True


def describe(error: BaseException) -> str:
    """Return the type and the first line of an exception, and where in the user's files it was raised, if there.

    Example: ``TypeError: … (my_loop.py, line 12: `loss.backward(1)`)``
    """
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    # The message of a SyntaxError names its line already.
    line = "" if isinstance(error, SyntaxError) else users_line(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {first_line.rstrip('.')}{f' ({line})' if line else ''}"


def users_line(frames: traceback.StackSummary) -> str:
    """Return the innermost of the ``frames`` in the user's files, as :func:`line_of` does; empty text if none is.

    Example: ``my_loop.py, line 12: `loss.backward(1)```
    """
    for frame in reversed(frames):
        if not frame.filename.startswith("<") and is_of_user(frame.filename):
            return line_of(frame.filename, frame.lineno or 0)
    return ""


def line_of(file: str, number: int) -> str:
    """Return the line of a file as an error shows it, with its text if this process knows it.

    Example: ``my_loop.py, line 12: `loss.backward(1)```
    """
    text = linecache.getline(file, number).strip()[:_MAX_LINE_CHARS]
    return f"{file_title(file)}, line {number}{f': `{text}`' if text else ''}"


def is_of_user(file: str) -> bool:
    """Return True if code in ``file`` is neither raytrain's, nor Python's, nor that of an installed package."""
    return not file.startswith((_PACKAGE, *_LIBRARIES))


def is_users_class(kind: type) -> bool:
    """Return True if a class is neither raytrain's, nor Python's, nor that of an installed package.

    In a worker, ``__main__`` is raytrain's program, but a class of that module is one of the user's script. A class
    that was sent to a worker may be of a module that the worker has not imported.
    """
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__" or module is None:
        return True
    file = getattr(module, "__file__", None)
    return file is not None and is_of_user(file)


def trace_of(error: BaseException) -> str:
    """Return the traceback of the cause of ``error``, such as an exception in the user's code; without one, its own."""
    return "".join(traceback.format_exception(error.__cause__ or error))


def lacks_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that there is too little memory, of a GPU or of the machine."""
    of_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's; for the CPU it has a RuntimeError
    return of_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def restart_may_help(error: BaseException) -> bool:
    """Return True if ``error`` looks transient: a lost worker, connection or process of Ray, or a failing device.

    A mistake in the user's code or a missing file would only fail again.
    """
    # Classes of Ray and torch are recognised by their names, so that neither is imported here. DistError is torch's for
    # its process groups. Gloo, which CPUs communicate with, raises a RuntimeError, recognised by its text.
    kinds = type(error).__mro__
    is_of_ray = any(kind.__module__.partition(".")[0] == "ray" for kind in kinds)
    is_of_device = any(word in str(error) for word in ("CUDA", "cuDNN", "NCCL"))
    is_of_system = isinstance(error, (OSError, EOFError)) and not isinstance(error, _NOT_TRANSIENT)
    is_of_connection = any(kind.__name__ == "DistError" for kind in kinds) or "gloo" in str(error).lower()
    return is_of_ray or is_of_device or is_of_system or is_of_connection


@contextmanager
def in_one_sentence(failure: str) -> Generator[None]:
    """Turn an exception of the user's code into a UsageError, ``failure`` and its reason, unless a restart may help.

    An exit by SystemExit counts as one, too. Errors of raytrain, and those that :func:`restart_may_help` finds
    transient, pass unchanged.

    Example: ``with in_one_sentence("--transforms cannot be called"): transform = make()``
    """
    try:
        yield
    except RaytrainError:
        raise
    except (Exception, SystemExit) as error:
        if restart_may_help(error):
            raise
        raise UsageError(f"{failure}: {describe(error)}.") from error
