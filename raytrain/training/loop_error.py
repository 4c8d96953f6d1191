"""An exception in a user's own loop, as one sentence that names the line in the user's file."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch.distributed as dist

import raytrain
from raytrain.errors import RaytrainError

_PACKAGE = str(Path(raytrain.__file__).parent)
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TEXT_CHARS = 120


class LoopFailed(RaytrainError):
    """A loop raised an exception before its first step was complete: another start would end the same way.

    ``trace`` is the exception's traceback, which travels with this to the process that started the run.
    """

    def __init__(self, sentence: str, trace: str) -> None:
        super().__init__(sentence, trace)
        self.trace = trace


def describe(error: BaseException) -> str:
    """What was raised, and where in the user's files: ``TypeError: … (my_loop.py, line 12: `loss.backward(1)`)``."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = ""
    if frames:
        frame = frames[-1]
        where = f" ({Path(frame.filename).name}, line {frame.lineno}: `{(frame.line or '')[:_TEXT_CHARS]}`)"
    return f"{type(error).__name__}: {first_line.rstrip('.')}{where}"


def may_pass(error: BaseException) -> bool:
    """Whether another start may do without ``error``: another worker, a connection or a process of Ray was lost."""
    is_of_ray = any(kind.__module__.partition(".")[0] == "ray" for kind in type(error).__mro__)
    is_of_device = any(word in str(error) for word in ("CUDA", "cuDNN", "NCCL"))
    is_of_worker = isinstance(error, (OSError, EOFError, dist.DistError)) or "gloo" in str(error).lower()
    return is_of_ray or is_of_device or is_of_worker


def _is_users(file: str) -> bool:
    return not file.startswith(("<", _PACKAGE, *_LIBRARIES))
