"""Tells which code is the user's, and makes one sentence of an exception in it, with its line."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from raytrain.errors import RaytrainError, UsageError, file_title

_PACKAGE = os.path.join(Path(__file__).parents[1], "")  # with a slash: raytrain_loops/ beside it is the user's
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")  # also those of `pip install --user`, and Debian's own
_MAX_LINE_CHARS = 120  # of a line of code that an error shows
_MAX_MESSAGE_CHARS = 1000  # of an exception's message: some hold the values of an array
# Messages of torch's other errors: of the CPU, and of CUDA's libraries, which allocate memory of their own.
_LACKS_MEMORY = re.compile(r"can't allocate memory|(?i:cuda)\b.*out of memory|_ALLOC(ATION)?_FAILED", re.DOTALL)
_NOT_TRANSIENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_of_user(file: str) -> bool:
    """Return True if code in ``file`` is neither raytrain's, nor Python's, nor that of an installed package."""
    is_installed = any(folder in file for folder in _PACKAGE_FOLDERS)
    return not (is_installed or file.startswith((_PACKAGE, *_LIBRARIES)))


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


def variables_of(function: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the global variables that a function names, and of those in its closure, each by name.

    Both are empty if ``function`` is no plain function, or a variable of its closure has no value yet.
    """
    with suppress(TypeError, ValueError):
        used = inspect.getclosurevars(cast(Any, function))
        return dict(used.globals), dict(used.nonlocals)
    return {}, {}


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


def describe(error: BaseException) -> str:
    """Return the type and the first line of an exception, and the line of the user's files that raised it, if one did.

    Example: ``TypeError: … (my_loop.py, line 12: `loss.backward(1)`)``
    """
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    # The message of a SyntaxError names its line already.
    line = "" if isinstance(error, SyntaxError) else users_line(traceback.extract_tb(error.__traceback__))
    message = _first_words(first_line.rstrip("."), _MAX_MESSAGE_CHARS)
    return f"{type(error).__name__}: {message}{f' ({line})' if line else ''}"


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
    text = _first_words(linecache.getline(file, number).strip(), _MAX_LINE_CHARS)
    return f"{file_title(file)}, line {number}{f': `{text}`' if text else ''}"


def _first_words(text: str, num_chars: int) -> str:
    """Cut ``text`` to ``num_chars`` characters, between two words, since a part of a secret would not be redacted."""
    return text if len(text) <= num_chars else f"{text[:num_chars].rpartition(' ')[0]} …"


def trace_of(error: BaseException) -> str:
    """Return the traceback of the cause of ``error``, such as an exception in the user's code; without one, its own."""
    return "".join(traceback.format_exception(error.__cause__ or error))


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


def lacks_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that there is too little memory, of a GPU or of the machine."""
    is_of_torch = type(error).__name__ == "OutOfMemoryError"
    return is_of_torch or isinstance(error, MemoryError) or _LACKS_MEMORY.search(str(error)) is not None
