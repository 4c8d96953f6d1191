"""Tells where a worker waits for the others, if it waits long: those that wait in different places wait for ever."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType

import torch.distributed as dist

from raytrain.config.user_code import users_line
from raytrain.training.gradients import Bucket
from raytrain.training.protocols import Reporter, Worker
from raytrain.training.step_metrics import StepMetrics
from raytrain.training.steps import Steps

_LOOK_S = 2.0
_LONG = 8  # looks in a row that find a worker waiting in the same place, before it is told
_TORCHS = dist.distributed_c10d.__file__
_WAITS = {each.__code__ for each in (Bucket.receive, StepMetrics.num_used, StepMetrics.read, StepMetrics.joined)}


@contextmanager
def tell_long_waits(steps: Steps, reporter: Reporter, worker: Worker) -> Iterator[None]:
    """In this context a thread looks where the calling one waits for other workers, and tells ``reporter`` if for long.

    It costs the loop nothing: all is read from the stack of the calling thread.
    """
    ended = threading.Event()
    arguments = steps, reporter, worker, threading.get_ident(), ended
    if worker.world_size > 1:
        threading.Thread(target=_watch, args=arguments, daemon=True, name="long-waits").start()
    try:
        yield
    finally:
        ended.set()


def _watch(steps: Steps, reporter: Reporter, worker: Worker, thread: int, ended: threading.Event) -> None:
    place, looks = None, 0
    with suppress(OSError, EOFError):  # whoever takes the reports may be gone first
        while not ended.wait(_LOOK_S):
            seen = _place(sys._current_frames().get(thread), steps)  # pyright: ignore[reportPrivateUsage]
            if place is not None and seen != place and looks >= _LONG:
                reporter.waits(worker.rank, worker.world_size, None)
            looks = looks + 1 if seen == place else 0
            place = seen
            if place is not None and looks >= _LONG:  # told each time, which shows that it is still so
                reporter.waits(worker.rank, worker.world_size, place)


def _place(frame: FrameType | None, steps: Steps) -> str | None:
    """Where in the run ``frame`` waits for other workers; None if it does something else."""
    innermost = islice(traceback.walk_stack(frame), 3) if frame else ()  # torch's own, and what calls it
    if not any(each.f_code in _WAITS or each.f_code.co_filename == _TORCHS for each, _ in innermost):
        return None
    line = users_line(traceback.extract_stack(frame))
    calls = f"after {steps.progress.step:,} steps and {steps.num_calls:,} calls of the run"
    return f"{calls} at {line}" if line else calls
