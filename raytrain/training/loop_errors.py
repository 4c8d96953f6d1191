"""Errors of a loop: each exception that it raises becomes one of ours, whose sentence says what to do.

torch has no exceptions of its own for most mistakes that many loops make, so they are known by a part of its message.
"""

from __future__ import annotations

import re
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager

from raytrain.config.user_code import describe, lacks_memory, restart_may_help, users_line
from raytrain.errors import LoopFailed, RaytrainError, UsageError
from raytrain.training.auto_accumulate import out_of_memory
from raytrain.training.batches.batch import BATCH_HAS, Batch, Epoch
from raytrain.training.run import Run
from raytrain.training.run_spec import RunSpec


@contextmanager
def errors_of_loop(spec: RunSpec, run: Run) -> Iterator[None]:
    """Turn an exception of the loop, which runs in this context, into one of raytrain's that says what to do.

    A successful exit, such as sys.exit(0), only ends the context. The exception is an OutOfMemory, a UsageError for
    mistakes that many loops make, or else a LoopFailed. If another attempt may help, the exception itself is raised.
    """
    first_step = run.progress.step
    try:
        yield
    except (RaytrainError, KeyboardInterrupt):
        raise
    except BdbQuit as error:
        raise LoopFailed(
            f"its loop was left in a debugger, or the debugger had no terminal ({_line_of(error)}): breakpoint() opens "
            "one, with --backend local --workers 1 in a terminal",
            restart_may_help=False,
        ) from error
    except BaseException as error:  # also SystemExit, and what asyncio raises
        if isinstance(error, SystemExit) and not error.code:  # sys.exit(), at the end of a script: the loop returns
            return
        if lacks_memory(error):
            raise out_of_memory(run) from error
        if restart_may_help(error):
            raise
        if (mistake := _common_mistake(error, run.world_size)) is not None:
            raise UsageError(mistake) from error

        # Any other exception. In the first step of the built-in loop, the network does not fit the images.
        step = run.progress.step
        if step:
            problem = f"its loop failed after step {step:,}"
        elif spec.loop is not None:
            problem = "its loop failed in its first step"
        else:
            height, width = spec.config.full_image_size
            problem = f"--model {spec.config.model} cannot be trained on images of {height}x{width} pixels"
        raise LoopFailed(f"{problem}: {describe(error)}", restart_may_help=step > first_step) from error


def _common_mistake(error: BaseException, world_size: int) -> str | None:
    """Return the sentence on a mistake that many loops make, if ``error`` comes from one; else None."""
    message, line = str(error), _line_of(error)

    # torch compares the workers' collectives after one of them has aborted, and its error has their shapes.
    if "Detected mismatch between collectives" in message:
        shapes = " and ".join(re.findall(r"TensorShape=(\[[\d, ]*\])", message)) or "none"
        return (
            f"A collective of torch.distributed got other tensors on some workers than on others (shapes {shapes}; "
            f"{line}); a worker may have an image less than another: use run.gather, or tensors of one shape."
        )

    # The loop comes from a script for torchrun, which makes the process group itself.
    if "initialize the default process group twice" in message:
        return (
            f"The loop calls init_process_group ({line}), and the run has a process group already; leave that call out."
        )

    # The loop comes from a script that torchrun always starts, so that there is always a process group.
    if "process group has not been initialized" in message and world_size == 1:
        return (
            f"The loop calls torch.distributed ({line}), and a run of one worker has no process group: use run.gather "
            "or run.total, which need none, or make that call only if run.world_size > 1."
        )

    # Some networks take torch's SyncBatchNorm because there is a process group, and compute while they are built.
    if "SyncBatchNorm expected input tensor to be on" in message:
        return (
            f"A network with SyncBatchNorm, which needs a GPU, computes before run.prepare has it ({line}): give it "
            "BatchNorm layers, whose statistics run.prepare joins over the workers."
        )

    return _wrong_use_of_batches(error, message, line)


def _wrong_use_of_batches(error: BaseException, message: str, line: str) -> str | None:
    """Return the sentence on a loop that takes the run, an epoch or a batch for what a loader has; else None.

    The ``message`` of a TypeError names the class of the object.
    """
    how_to_loop = "write `for epoch in run.epochs():`, and in it `for batch in epoch:`."
    if isinstance(error, AttributeError) and isinstance(error.obj, Run):
        return f"The loop takes run.{error.name} ({line}), which a run does not have; for its batches, {how_to_loop}"
    epoch_has = (
        "an epoch has epoch.number, counted from 0, and len(epoch), the number of its batches, which `for batch in "
        "epoch:` gives."
    )
    if isinstance(error, AttributeError) and isinstance(error.obj, Batch):
        return f"The loop takes batch.{error.name} ({line}); a batch has {BATCH_HAS}."
    if isinstance(error, AttributeError) and isinstance(error.obj, Epoch):
        # The loop uses run.epochs() like a loader, whose items are batches, or an epoch like one, which has a data set.
        if error.name in (*Batch.__dataclass_fields__, *vars(Batch)):
            return f"The loop takes an epoch for a batch ({line}); {how_to_loop}"
        return f"The loop takes epoch.{error.name} ({line}); {epoch_has}"
    if isinstance(error, TypeError) and re.search(r"'Epoch'|\bEpoch\.__|not Epoch\b", message):
        return f"The loop takes an epoch for a number or a list ({line}); {epoch_has}"
    goes_over_method = "'method' object is not iterable" in message and "run.epochs" in line
    is_of_run = "'Run' object is not iterable" in message or "'DeviceBatches' object" in message  # run.batches
    if isinstance(error, TypeError) and (is_of_run or goes_over_method):
        return f"The loop goes over the run, or a part of it, in place of its epochs ({line}); {how_to_loop}"
    return None


def _line_of(error: BaseException) -> str:
    """Return the user's line in which ``error`` was raised, as sentences name it."""
    return users_line(traceback.extract_tb(error.__traceback__))
