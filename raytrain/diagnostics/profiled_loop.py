"""Worker of a profiled run: a few steps, left as a trace and as seconds of each phase."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.profiler import profile, record_function, schedule

from raytrain.diagnostics.profile import Interval, Ranges, phase_seconds
from raytrain.training import loop as built_in
from raytrain.training.batch import Batch
from raytrain.training.run import WAIT_FOR_DATA, Run

WARM_UP_STEPS, NUM_STEPS = 5, 10
_BODY, _BACKWARD, _OPTIMIZER = "loop", "backward", "optimizer"


def profiled_loop(run: Run, loop: Callable[[Run], None] | None, folder: str) -> None:
    """Train a few steps with ``loop``. Writes ``worker-RANK.trace.json.gz`` and ``worker-RANK.json`` to ``folder``."""
    steps = schedule(wait=0, warmup=WARM_UP_STEPS, active=NUM_STEPS, repeat=1)
    write = partial(_write, folder=Path(folder), run=run)
    with profile(schedule=steps, on_trace_ready=write) as profiler:
        (loop or built_in.train)(cast(Run, _ProfiledRun(run, profiler)))


class _ProfiledRun:
    """A run that marks its phases in the trace, and whose batches end after the profiled steps.

    On a GPU each phase waits for the device at its end: otherwise the next phase that waits would get its time.
    """

    def __init__(self, run: Run, profiler: profile) -> None:
        self._run = run
        self._profiler = profiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def batches(self, *arguments: Any, **options: Any) -> Iterator[Batch]:
        for batch in islice(self._run.batches(*arguments, **options), WARM_UP_STEPS + NUM_STEPS):
            self._wait_for_device()
            with record_function(_BODY):
                yield batch
                self._wait_for_device()
            self._profiler.step()

    def backward(self, loss: torch.Tensor) -> None:
        self._wait_for_device()
        with record_function(_BACKWARD):
            self._run.backward(loss)
            self._wait_for_device()

    def step(self, optimizer: Optimizer, **options: Any) -> None:
        with record_function(_OPTIMIZER):
            self._run.step(optimizer, **options)
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)


def _write(profiler: profile, folder: Path, run: Run) -> None:
    profiler.export_chrome_trace(str(folder / f"worker-{run.rank}.trace.json.gz"))
    seconds = phase_seconds(_ranges(profiler, on_gpu=run.device.type == "cuda"))
    (folder / f"worker-{run.rank}.json").write_text(json.dumps(seconds))


def _ranges(profiler: profile, *, on_gpu: bool) -> Ranges:
    """What the profiler recorded, in microseconds."""
    events = list(profiler.events() or ())
    named = {
        name: [_interval(event) for event in events if event.name == name and not _is_on_gpu(event)]
        for name in (WAIT_FOR_DATA, _BODY, _BACKWARD, _OPTIMIZER)
    }
    steps = [event for event in events if event.name == "ProfilerStep*" and not _is_on_gpu(event)]
    collectives = [event for event in events if event.name.startswith(("gloo:", "ncclDevKernel"))]
    computing = [event for event in events if event.name.startswith("aten::") and event.thread == steps[0].thread]
    if on_gpu:
        kernels = [event for event in events if _is_on_gpu(event) and not event.is_user_annotation]
        computing = [event for event in kernels if not event.name.startswith("nccl")]
    return Ranges(
        steps=[_interval(event) for event in steps],
        waits=named[WAIT_FOR_DATA],
        bodies=named[_BODY],
        backwards=named[_BACKWARD],
        optimizers=named[_OPTIMIZER],
        collectives=[_interval(event) for event in collectives],
        computing=[_interval(event) for event in computing],
    )


def _is_on_gpu(event: Any) -> bool:
    return event.device_type.name == "CUDA"


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end
