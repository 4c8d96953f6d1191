"""Runs of ``raytrain.attach`` in this process, in those of a gloo group, and as a program for a launcher.

``torchrun --nproc-per-node=2 -m tests.helpers.attached_runs IMAGES STORAGE`` trains one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import raytrain
from raytrain.errors import RaytrainError
from raytrain.runs.documents import CONFIG, run_store
from tests.helpers.small_runs import config, loop_with
from tests.helpers.waiting import wait_for

LAUNCHERS = {"workers": "auto"}
"""What the options of ``small_runs.config`` leave to the launcher."""
BeforeStep = Callable[[raytrain.Run, raytrain.Batch], None]


def attached_run(
    images: Path, storage: Path | str, before_step: BeforeStep = lambda run, batch: None, **options: Any
) -> raytrain.TrainResult:
    """Train a run of ``small_runs`` in a block of ``raytrain.attach``, and return its result, the same on each worker.

    ``before_step`` is called before each step.
    """
    with raytrain.attach(config(images, storage, **{**LAUNCHERS, **options})) as run:
        loop_with(run, before_step)
    assert run.result is not None
    return run.result


def stop_after(step: int, storage: Path) -> BeforeStep:
    """Return what asks the run to stop, as ``raytrain stop`` does, and waits until worker 0 has heard of it."""

    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if run.progress.step == step and run.rank == 0:
            wait_for(lambda: run_store(str(storage), "run").exists(CONFIG))  # a thread of the run writes it
            raytrain.stop("run", storage=storage, reason="enough")
            wait_for(run.reporter.stop_requested)

    return before_step


def stopped_run(images: Path, storage: Path, step: int) -> raytrain.TrainResult:
    """Train until somebody stops the run after ``step`` steps."""
    return attached_run(images, storage, stop_after(step, storage))


def failed_run(images: Path, storage: Path, failing_rank: int) -> str:
    """Return what a worker raises in a run of which worker ``failing_rank`` fails."""

    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if run.progress.step == 6 and run.rank == failing_rank:
            raise ValueError("a mistake of the user's")

    raised = "nothing"
    try:
        attached_run(images, storage, before_step)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    gc.collect()  # ends the connections of the run's own groups, as the end of a process does
    return raised


def refusal(images: Path, storage: Path, rank_with_options: int, options: dict[str, Any]) -> str:
    """Return the sentence of what this worker raises if only ``rank_with_options`` has these ``options``."""
    try:
        attached_run(images, storage, **(options if dist.get_rank() == rank_with_options else {}))
    except RaytrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    result = attached_run(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{dist.get_rank()}: {result.status}")
    dist.destroy_process_group()
