"""`raytrain profile`: where the time of a step goes, and advice."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import profiler as torch_profiler
from torch.profiler import record_function

from raytrain.config import TrainConfig
from raytrain.config.user_code import load_optional
from raytrain.config.values import Location
from raytrain.errors import UsageError, format_count
from raytrain.launch.option_checks import check_options
from raytrain.launch.prepare import open_decided
from raytrain.launch.train import train
from raytrain.runs.documents import run_store
from raytrain.storage.open import absolute_path, open_store
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training import loop as built_in
from raytrain.training.batch import Batch, Epoch
from raytrain.training.optimizer_steps import optimizer_hooks
from raytrain.training.run import WAIT_FOR_DATA, Run

Interval = tuple[float, float]  # start and end, in microseconds
PHASES = ("waiting for data", "copy and augmentation", "forward", "backward", "all-reduce", "optimizer", "other")
_MANY_EPOCHS = 1000  # the loop ends the run, not the plan; an epoch may have a single step


@dataclass(frozen=True)
class ProfileResult:
    """The time of a step by phases, averaged over the profiled steps."""

    workers: tuple[dict[str, float], ...]  # seconds of each phase, for each worker
    traces: tuple[str, ...]  # a Chrome trace of each worker: chrome://tracing and https://ui.perfetto.dev open it
    advice: str

    @property
    def step_s(self) -> float:
        """Seconds of a step, averaged over the workers."""
        return mean(sum(worker.values()) for worker in self.workers)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, averaged over the workers."""
        return {name: mean(worker[name] for worker in self.workers) for name in PHASES}

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**dataclasses.asdict(self), "step_s": self.step_s, "phases": self.phases}


def profile(
    config: TrainConfig, *, output: Location = "profile", loop: Callable[[Run], None] | None = None
) -> ProfileResult:
    """Train a few steps of a run on this machine, without Ray, and say where their time goes.

    Nothing of the run is kept but the traces, in the folder ``output``. ``loop`` is a training loop to use instead of
    the built-in one or the one that ``config`` names. Raises what :func:`raytrain.train` raises.

    Example: ``raytrain.profile(recipes.cifar10(data="s3://bucket/train")).advice``
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to standard error without a GPU
    check_options(config, loop)
    if "://" in os.fspath(output):
        raise UsageError(f"--output is {output}, but traces are written into a folder of this machine; give one.")
    folder = Path(absolute_path(os.fspath(output)))
    open_store(str(folder)).check_writable()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-[0-9]*.trace.json.gz"):
        old.unlink()

    with TemporaryFolder() as temporary:
        # The recipe auto decides on the options as for a run: with a loop, the run itself would leave them as they are.
        if config.open_options:
            config, _ = open_decided(config, run_store(str(temporary / "runs"), "profile"), loop)
        short = _short_run(config, str(temporary / "runs"))
        result = train(short, loop=partial(profiled_loop, loop=loop, traces=str(folder), folder=str(temporary)))

        # Each worker has written its trace, and its seconds into the temporary folder.
        files = sorted(temporary.glob("worker-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
        workers = tuple(json.loads(file.read_text()) for file in files)
    if not workers:
        raise UsageError(
            f"The training ended after {format_count(result.steps, 'step')}, and a profile takes "
            f"{WARM_UP_STEPS + NUM_STEPS}; let the loop train until its epochs end."
        )
    traces = tuple(str(folder / f"{file.stem}.trace.json.gz") for file in files)
    return ProfileResult(workers, traces, advice(ProfileResult(workers, traces, "").phases, config))


def _short_run(config: TrainConfig, storage: str) -> TrainConfig:
    """Return options for the same training on this machine, with nothing but its steps: no evaluation, no early end."""
    return dataclasses.replace(
        config,
        name="profile",
        storage=storage,
        backend="local",
        device="cuda" if config.accelerator_type else config.device,
        address=None,
        scope_keys=False,
        wait_for_machines_s=0.0,
        workers=config.workers if config.elastic_workers is None else "auto",
        resume=False,
        epochs=_MANY_EPOCHS,
        head_epochs=0,  # steps of the head alone are few, and cost a third
        max_steps=None,
        max_failures=0,
        until=None,
        patience=None,
        max_time=None,
        max_cost=None,
        evaluate_every=0,
        checkpoint_every=(),
        trace=False,
        track=(),
    )


def advice(phases: dict[str, float], config: TrainConfig) -> str:
    """Return one sentence on what would make the steps of a run with these ``phases`` (in seconds) faster."""
    # The advice is about the first of these phases that takes much time; the network itself comes last.
    share = {name: seconds / sum(phases.values()) for name, seconds in phases.items()}
    part = {name: f"{fraction:.0%} of a step" for name, fraction in share.items()}
    if share["waiting for data"] > 0.15:
        return (
            f"Waiting for data takes {part['waiting for data']}: pack the images with `raytrain pack`, give more cores "
            "to reading, or keep them decoded with --cache memory, so that only the first epoch waits."
        )
    if share["all-reduce"] > 0.2:
        return (
            f"Waiting for the other workers' gradients takes {part['all-reduce']}: a larger --batch-size makes that "
            f"rarer{', and fewer workers need less of it' if config.accumulate != 1 else ', and so does --accumulate'}."
        )
    if share["copy and augmentation"] > 0.25:
        return f"Copying and augmenting takes {part['copy and augmentation']}: leave out augmentations to be faster."
    if share["optimizer"] > 0.25:
        return f"The optimizer takes {part['optimizer']}: a larger --batch-size has fewer steps for as many images."

    # The network itself: the options that make it faster, if they are not chosen yet.
    flags = [
        *(["--precision auto"] if config.precision in ("float32", "tf32", "float64") else []),
        *([] if config.channels_last else ["--channels-last"]),
        *([] if config.compile else ["--compile"]),
    ]
    hint = f"try {' and '.join(flags)}" if flags else "more workers or a smaller network would make it faster"
    return f"The network itself takes {share['forward'] + share['backward']:.0%} of a step: {hint}."


@dataclass(frozen=True)
class Ranges:
    """When one worker did what in its profiled steps."""

    steps: Sequence[Interval]
    waits: Sequence[Interval]  # waits for the next batch
    bodies: Sequence[Interval]  # bodies of the loop: from a batch to the request for the next one
    backwards: Sequence[Interval]
    optimizers: Sequence[Interval]
    collectives: Sequence[Interval]  # sums over the workers
    computing: Sequence[Interval]


def phase_seconds(ranges: Ranges) -> dict[str, float]:
    """Return the seconds of each of :data:`PHASES` in an average step; their sum is the time of a step.

    All-reduce is only the time in which a worker waits for the others and computes nothing. It does not count for the
    phase in which it lies, such as backward.
    """
    # Split the time at each start and end of any interval: each piece lies wholly inside or outside of each phase.
    edges = np.unique([edge for kind in vars(ranges).values() for interval in kind for edge in interval])
    middles, lengths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)  # (num_edges - 1,)

    def within(intervals: Sequence[Interval]) -> NDArray[np.bool_]:
        """Return which pieces of time lie in one of ``intervals``: there more intervals have begun than ended."""
        starts, ends = np.sort(np.reshape(intervals, (-1, 2)), axis=0).T
        return np.searchsorted(starts, middles) > np.searchsorted(ends, middles)

    # Copies lie between the wait for a batch and the loop's body. Forward goes from the start of the body to the end of
    # its last backward, without the backwards themselves.
    copies = [(wait[1], body[0]) for wait, body in zip(ranges.waits, ranges.bodies, strict=False)]
    forwards: list[Interval] = []
    for start, end in ranges.bodies:
        ends = [min(last, end) for first, last in ranges.backwards if first < end and start < last]
        forwards.append((start, max(ends, default=start)))

    backward = within(ranges.backwards)
    phases = {
        "waiting for data": within(ranges.waits),
        "copy and augmentation": within(copies),
        "forward": within(forwards) & ~backward,
        "backward": backward,
        "optimizer": within(ranges.optimizers),
    }
    steps, alone = within(ranges.steps), within(ranges.collectives) & ~within(ranges.computing)
    seconds = {name: float(lengths[steps & phase & ~alone].sum()) for name, phase in phases.items()}
    seconds["all-reduce"] = float(lengths[steps & alone].sum())
    seconds["other"] = float(lengths[steps].sum()) - sum(seconds.values())
    return {name: seconds[name] / len(ranges.steps) / 1e6 for name in PHASES}


WARM_UP_STEPS, NUM_STEPS = 5, 10
_BODY, _BACKWARD, _OPTIMIZER = "loop", "backward", "optimizer"


def profiled_loop(run: Run, loop: Callable[[Run], None] | None, traces: str, folder: str) -> None:
    """Train a few steps with ``loop``, or else the one that the options name, or the built-in one.

    Writes ``worker-RANK.trace.json.gz`` into the folder ``traces``, and the seconds of the phases as
    ``worker-RANK.json`` into ``folder``.

    The phases are marked in the trace. On a GPU, each phase waits for the device at its end, because calls return
    before their work is done.
    """

    def wait() -> None:
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)

    def write(profiler: torch_profiler.profile) -> None:
        profiler.export_chrome_trace(str(Path(traces, f"worker-{run.rank}.trace.json.gz")))
        seconds = phase_seconds(_ranges(profiler, on_gpu=run.device.type == "cuda"))
        Path(folder, f"worker-{run.rank}.json").write_text(json.dumps(seconds))

    # A loop that the options name is imported in this process: it cannot travel, as other processes lack its module.
    own_loop = loop or load_optional("--loop", run.config.loop) or built_in.train
    all_epochs = run.epochs

    def few_epochs(*arguments: Any, **options: Any) -> Iterator[Epoch]:
        num_left = WARM_UP_STEPS + NUM_STEPS
        for epoch in all_epochs(*arguments, **options):
            yield Epoch(epoch.number, len(epoch), marked_batches(islice(epoch, num_left)), lambda: False)
            num_left -= len(epoch)
            if num_left <= 0:
                return

    def marked_batches(batches: Iterator[Batch]) -> Generator[Batch]:
        for batch in batches:
            wait()
            with record_function(_BODY):
                yield batch
                wait()
            profiler.step()

    # The first steps are not profiled, because they compile and choose algorithms. The loop gets no further batches.
    steps = torch_profiler.schedule(wait=0, warmup=WARM_UP_STEPS, active=NUM_STEPS, repeat=1)
    with (
        torch_profiler.profile(schedule=steps, on_trace_ready=write, acc_events=True) as profiler,
        patch.object(run, "epochs", few_epochs),
        _marked(torch.Tensor, "backward", _BACKWARD, wait),
        _marked_optimizers(wait),
    ):
        own_loop(run)


@contextmanager
def _marked(owner: type, name: str, phase: str, wait: Callable[[], None]) -> Iterator[None]:
    """Mark each call of the method ``name`` of ``owner`` in this context as a ``phase`` in the trace."""
    method = getattr(owner, name)
    is_within = False

    @wraps(method)
    def marked(*arguments: Any, **options: Any) -> Any:
        # In the steps in which the loop is watched, torch hands its own call on to the method once more.
        nonlocal is_within
        if is_within:
            return method(*arguments, **options)
        is_within = True
        try:
            wait()
            with record_function(phase):
                result = method(*arguments, **options)
                wait()
            return result
        finally:
            is_within = False

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextmanager
def _marked_optimizers(wait: Callable[[], None]) -> Iterator[None]:
    """Mark the steps of all optimizers in this context as a phase of the trace, by torch's own hooks."""
    # If one optimizer wraps another, a step lies within a step; the inner one ends first.
    phases: list[record_function] = []

    def begin(*_: object) -> None:
        phases.append(record_function(_OPTIMIZER))
        phases[-1].__enter__()

    def end(*_: object) -> None:
        wait()
        phases.pop().__exit__(None, None, None)

    with optimizer_hooks(begin, end):
        yield


def _ranges(profiler: torch_profiler.profile, *, on_gpu: bool) -> Ranges:
    """Return the profiler's intervals, in microseconds."""
    events = list(profiler.events() or ())
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    on_cpu = [event for event in events if event.device_type.name != "CUDA"]
    steps, waits, bodies, backwards, optimizers = (
        [event for event in on_cpu if event.name == name]
        for name in ("ProfilerStep*", WAIT_FOR_DATA, _BODY, _BACKWARD, _OPTIMIZER)
    )
    collectives = [event for event in events if event.name.startswith(("gloo:", "ncclDevKernel"))]
    # Computing is, on a GPU, any kernel but NCCL's, and on CPUs any operator of torch in the thread of the steps.
    if on_gpu:
        computing = [event for event in kernels if not event.is_user_annotation and not event.name.startswith("nccl")]
    else:
        computing = [event for event in events if event.name.startswith("aten::") and event.thread == steps[0].thread]
    kinds = (steps, waits, bodies, backwards, optimizers, collectives, computing)
    return Ranges(*([(event.time_range.start, event.time_range.end) for event in kind] for kind in kinds))
