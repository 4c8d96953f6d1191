"""Reports where a worker waits long for the others, because workers that wait in different places wait for ever."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType

import torch
import torch.distributed as dist

from raytrain.config.user_code import users_line
from raytrain.errors import format_count
from raytrain.training.exact.gradients import Bucket
from raytrain.training.metrics.step_metrics import StepMetrics
from raytrain.training.protocols import Reporter, Worker
from raytrain.training.steps import Steps

_POLL_EVERY_S = 2.0
_NUM_POLLS = 8  # a wait is reported once this many further polls in a row have seen it in the same place
_COLLECTIVES = dist.distributed_c10d.__file__  # torch's file of collectives
_WAITING_METHODS = {
    method.__code__ for method in (Bucket.receive, StepMetrics.num_used, StepMetrics.read, StepMetrics.joined)
}


def wait_for_all() -> None:
    """Wait until every worker has called this; a single worker waits for nothing.

    Example: ``wait_for_all()  # afterwards, each worker has written its files``
    """
    if dist.is_initialized():
        # On GPUs, torch warns, at the end of each run, of a barrier that does not name the GPU of its process.
        is_on_gpus = dist.get_backend() == dist.Backend.NCCL
        dist.barrier(device_ids=[torch.cuda.current_device()] if is_on_gpus else None)


@contextmanager
def report_long_waits(
    steps: Steps, reporter: Reporter, worker: Worker, poll_every_s: float = _POLL_EVERY_S
) -> Iterator[None]:
    """Poll, in this context, where the calling thread waits for other workers, and report a long wait.

    A wait is long after some 16 seconds in the same place. Polling costs the loop nothing, because another thread reads
    the stack of this one; a single worker has none.
    """
    polled_thread, ended = threading.get_ident(), threading.Event()

    def poll() -> None:
        location, num_polls = None, 0  # where it waited in the last poll, and how many polls before saw the same
        with suppress(OSError, EOFError):  # the process that takes the reports may end first
            while not ended.wait(poll_every_s):
                # No variable keeps the frame: its own variables, such as images, would live until the next poll.
                current = _wait_location(sys._current_frames().get(polled_thread), steps)  # pyright: ignore[reportPrivateUsage]
                if location is not None and current != location and num_polls >= _NUM_POLLS:
                    reporter.note_wait(worker.rank, worker.world_size, None)
                num_polls = num_polls + 1 if current == location else 0
                location = current
                if location is not None and num_polls >= _NUM_POLLS:  # repeated, to show that the worker still waits
                    reporter.note_wait(worker.rank, worker.world_size, location)

    if worker.world_size > 1:
        threading.Thread(target=poll, daemon=True, name="long-waits").start()
    try:
        yield
    finally:
        ended.set()


def _wait_location(frame: FrameType | None, steps: Steps) -> str | None:
    """Return where in the run ``frame`` waits for other workers, in words; None if it does something else.

    ``frame`` is the innermost one of a thread's stack; None if the thread has ended.
    """
    # Where a collective waits, one of the three innermost frames is torch's, or of a method of ours that calls it.
    innermost = islice(traceback.walk_stack(frame), 3) if frame else ()
    if not any(
        caller.f_code in _WAITING_METHODS or caller.f_code.co_filename == _COLLECTIVES for caller, _ in innermost
    ):
        return None
    # The counts tell places apart that are the same line of a loop.
    line = users_line(traceback.extract_stack(frame))
    calls = f"after {format_count(steps.progress.step, 'step')} and {format_count(steps.num_calls, 'call')} of the run"
    return f"{calls} at {line}" if line else calls
