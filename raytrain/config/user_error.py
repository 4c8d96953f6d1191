"""An exception in the user's own code, as one sentence that names the line in the user's file."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from raytrain.errors import RaytrainError, UsageError

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TEXT_CHARS = 120
_OF_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def describe(error: BaseException) -> str:
    """What was raised, and where in the user's files: ``TypeError: … (my_loop.py, line 12: `loss.backward(1)`)``."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    line = "" if isinstance(error, SyntaxError) else users_line(traceback.extract_tb(error.__traceback__))  # it has one
    return f"{type(error).__name__}: {first_line.rstrip('.')}{f' ({line})' if line else ''}"


def users_line(frames: traceback.StackSummary) -> str:
    """The innermost line in the user's files, ``my_loop.py, line 12: `loss.backward(1)```; empty if there is none."""
    for frame in reversed(frames):
        if not frame.filename.startswith(("<", _PACKAGE, *_LIBRARIES)):
            return f"{Path(frame.filename).name}, line {frame.lineno}: `{(frame.line or '')[:_TEXT_CHARS]}`"
    return ""


def trace_of(error: BaseException) -> str:
    """The traceback of what ``error`` was made of, such as an exception in the user's code; otherwise its own."""
    return "".join(traceback.format_exception(error.__cause__ or error))


def may_pass(error: BaseException) -> bool:
    """Whether another start may do without ``error``: another worker, a connection or a process of Ray was lost."""
    kinds = type(error).__mro__
    is_of_ray = any(kind.__module__.partition(".")[0] == "ray" for kind in kinds)
    is_of_device = any(word in str(error) for word in ("CUDA", "cuDNN", "NCCL"))
    is_of_system = isinstance(error, (OSError, EOFError)) and not isinstance(error, _OF_FILES)
    is_of_worker = any(kind.__name__ == "DistError" for kind in kinds) or "gloo" in str(error).lower()
    return is_of_ray or is_of_device or is_of_system or is_of_worker


@contextmanager
def in_one_sentence(what: str) -> Generator[None]:
    """Make a UsageError of what the user's code raises, unless it may pass: ``what`` happened, and its description."""
    try:
        yield
    except RaytrainError:
        raise
    except (Exception, SystemExit) as error:
        if may_pass(error):
            raise
        raise UsageError(f"{what}: {describe(error)}.") from error
