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
from raytrain.config.named_functions import load_optional
from raytrain.config.option_calls import takes_config
from raytrain.config.option_values import Location
from raytrain.errors import UsageError, format_count
from raytrain.launch.choose_options import open_decided
from raytrain.launch.option_checks import check_options
from raytrain.launch.train import train
from raytrain.runs.documents import run_store
from raytrain.storage.open import absolute_path, open_store
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training import loop as built_in
from raytrain.training.batches.batch import Batch, Epoch
from raytrain.training.optimizer_steps import optimizer_hooks
from raytrain.training.run import WAIT_FOR_DATA, Run

Interval = tuple[float, float]  # start and end, in microseconds
PHASES = ("waiting for data", "copy and augmentation", "forward", "backward", "all-reduce", "optimizer", "other")
WARM_UP_STEPS, NUM_STEPS = 5, 10
_MANY_EPOCHS = 1000  # an epoch may have a single step; the loop ends long before, after the profiled steps
_BODY, _BACKWARD, _OPTIMIZER = "loop", "backward", "optimizer"  # names of the marks in a trace


@dataclass(frozen=True)
class ProfileResult:
    """The time of a step by phases, averaged over the profiled steps."""

    workers: tuple[dict[str, float], ...]  # seconds of each phase, for each worker
    phases: dict[str, float]  # seconds of each phase, averaged over the workers
    traces: tuple[str, ...]  # a Chrome trace of each worker: chrome://tracing and https://ui.perfetto.dev open it
    advice: str

    @property
    def step_s(self) -> float:
        """Seconds of a step, averaged over the workers."""
        return sum(self.phases.values())

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**dataclasses.asdict(self), "step_s": self.step_s}


@takes_config
def profile(
    config: TrainConfig, *, output: Location = "profile", loop: Callable[[Run], None] | None = None
) -> ProfileResult:
    """Train a few steps of a run on this machine, without Ray, and say where their time goes.

    Nothing of the run is kept but the traces, in the folder ``output``, which replace those of an earlier profile.
    ``loop`` is a training loop to use instead of the built-in one or the one that ``config`` names.

    Raises what :func:`raytrain.train` raises, and UsageError if ``output`` is not on this machine or the loop ends
    before the last profiled step.

    Example: ``raytrain.profile(recipes.cifar10(data="s3://bucket/train")).advice``
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps torch's profiler from complaining that there is no GPU
    check_options(config, loop)
    if "://" in os.fspath(output):
        raise UsageError(f"--output is {output}, but traces are written into a folder of this machine; give one.")
    folder = Path(absolute_path(os.fspath(output)))
    open_store(str(folder)).check_writable()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-[0-9]*.trace.json.gz"):
        old.unlink()

    with TemporaryFolder() as temporary:
        # Let the recipe auto choose the options that it leaves open. The run below would not: it gets a loop from here,
        # and a run with a loop keeps the defaults of open options.
        if config.open_options:
            config, _ = open_decided(config, run_store(str(temporary / "runs"), "profile"), loop)
        short = _short_run(config, str(temporary / "runs"))
        profiled = partial(profiled_loop, loop=loop, trace_folder=str(folder), seconds_folder=str(temporary))
        result = train(short, loop=profiled)

        # Each worker has written its trace, and the seconds of its phases into the temporary folder.
        files = sorted(temporary.glob("worker-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
        workers = tuple(json.loads(file.read_text()) for file in files)
    if not workers:
        raise UsageError(
            f"The training ended after {format_count(result.steps, 'step')}, and a profile takes "
            f"{WARM_UP_STEPS + NUM_STEPS}; let the loop train until its epochs end."
        )
    phases = {name: mean(worker[name] for worker in workers) for name in PHASES}
    traces = tuple(str(folder / f"{file.stem}.trace.json.gz") for file in files)
    return ProfileResult(workers, phases, traces, advice(phases, config))


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
    takes = {name: f"takes {fraction:.0%} of a step" for name, fraction in share.items()}
    if share["waiting for data"] > 0.15:
        return (
            f"Waiting for data {takes['waiting for data']}: pack the images with `raytrain pack`, give more cores "
            "to reading, or keep them decoded with --cache memory, so that only the first epoch waits."
        )
    if share["all-reduce"] > 0.2:
        other_advice = "and fewer workers need less of it" if config.accumulate != 1 else "and so does --accumulate"
        return (
            f"Waiting for the other workers' gradients {takes['all-reduce']}: a larger --batch-size makes that "
            f"rarer, {other_advice}."
        )
    if share["copy and augmentation"] > 0.25:
        return f"Copying and augmenting {takes['copy and augmentation']}: leave out augmentations to be faster."
    if share["optimizer"] > 0.25:
        return f"The optimizer {takes['optimizer']}: a larger --batch-size has fewer steps for as many images."

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
    """When one worker did what in its profiled steps: intervals of the profiler's clock, in microseconds."""

    steps: Sequence[Interval]
    waits: Sequence[Interval]  # waits for the next batch
    bodies: Sequence[Interval]  # bodies of the loop: from a batch to the request for the next one
    backwards: Sequence[Interval]
    optimizers: Sequence[Interval]
    collectives: Sequence[Interval]  # sums over the workers
    computing: Sequence[Interval]  # on a GPU its kernels, otherwise torch's operators on the CPU


def phase_seconds(ranges: Ranges) -> dict[str, float]:
    """Return the seconds of each of :data:`PHASES` in an average step; their sum is the time of a step.

    All-reduce is only the time in which a worker waits for the others and computes nothing. This time does not count
    for the phase in which it lies, such as backward.
    """
    # Split the time at each start and end of any interval: each piece lies wholly inside or outside of each phase.
    edges = np.unique([edge for kind in vars(ranges).values() for interval in kind for edge in interval])
    middles, lengths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)  # (num_edges - 1,)

    def within(intervals: Sequence[Interval]) -> NDArray[np.bool_]:
        """Return which pieces of time lie in one of ``intervals``: there more intervals have begun than ended."""
        starts, ends = np.sort(np.reshape(intervals, (-1, 2)), axis=0).T
        return np.searchsorted(starts, middles) > np.searchsorted(ends, middles)

    # Copies lie between the wait for a batch and the loop's body. Forward goes from the start of the body to the end of
    # its last backward, without the backwards themselves; a body without a backward has no forward.
    copies = [(wait[1], body[0]) for wait, body in zip(ranges.waits, ranges.bodies, strict=False)]
    forwards: list[Interval] = []
    for start, end in ranges.bodies:
        ends_of_backwards = [min(last, end) for first, last in ranges.backwards if first < end and start < last]
        forwards.append((start, max(ends_of_backwards, default=start)))

    backward = within(ranges.backwards)
    phases = {
        "waiting for data": within(ranges.waits),
        "copy and augmentation": within(copies),
        "forward": within(forwards) & ~backward,
        "backward": backward,
        "optimizer": within(ranges.optimizers),
    }
    steps, alone = within(ranges.steps), within(ranges.collectives) & ~within(ranges.computing)
    microseconds = {name: float(lengths[steps & phase & ~alone].sum()) for name, phase in phases.items()}
    microseconds["all-reduce"] = float(lengths[steps & alone].sum())
    microseconds["other"] = float(lengths[steps].sum()) - sum(microseconds.values())
    return {name: microseconds[name] / 1e6 / len(ranges.steps) for name in PHASES}


def profiled_loop(run: Run, loop: Callable[[Run], None] | None, trace_folder: str, seconds_folder: str) -> None:
    """Train a few steps with ``loop``, or else the one that the options name, or the built-in one.

    Writes ``worker-RANK.trace.json.gz`` into ``trace_folder``, and the seconds of the phases as ``worker-RANK.json``
    into ``seconds_folder``; nothing if the loop ends before the last profiled step.

    The phases are marked in the trace. On a GPU, each phase waits for the device at its end, because calls return
    before their work is done.
    """
    is_on_gpu = run.device.type == "cuda"

    def wait_for_device() -> None:
        if is_on_gpu:
            torch.cuda.synchronize(run.device)

    def write(profiler: torch_profiler.profile) -> None:
        profiler.export_chrome_trace(str(Path(trace_folder, f"worker-{run.rank}.trace.json.gz")))
        seconds = phase_seconds(_ranges(profiler, on_gpu=is_on_gpu))
        Path(seconds_folder, f"worker-{run.rank}.json").write_text(json.dumps(seconds))

    # The first steps are not profiled, because they compile and choose algorithms.
    schedule = torch_profiler.schedule(wait=0, warmup=WARM_UP_STEPS, active=NUM_STEPS, repeat=1)
    profiler = torch_profiler.profile(schedule=schedule, on_trace_ready=write, acc_events=True)

    # A loop that the options name is imported in this process: it cannot travel, as other processes lack its module.
    own_loop = loop or load_optional("--loop", run.config.loop) or built_in.train
    with (
        profiler,
        patch.object(run, "epochs", partial(_profiled_epochs, run.epochs, profiler, wait_for_device)),
        _marked(torch.Tensor, "backward", _BACKWARD, wait_for_device),
        _marked_optimizers(wait_for_device),
    ):
        own_loop(run)


def _profiled_epochs(
    epochs: Callable[..., Iterator[Epoch]],
    profiler: torch_profiler.profile,
    wait_for_device: Callable[[], None],
    *arguments: Any,
    **options: Any,
) -> Iterator[Epoch]:
    """Yield the epochs of a run, by its method ``epochs``, without the batches after the last profiled step.

    What the loop does with a batch is marked in the trace, and the ``profiler`` gets to know when a step is over.
    ``arguments`` and ``options`` are those that the loop gives to ``epochs``.
    """

    def marked(batches: Iterator[Batch]) -> Generator[Batch]:
        for batch in batches:
            wait_for_device()
            with record_function(_BODY):
                yield batch
                wait_for_device()
            profiler.step()

    num_left = WARM_UP_STEPS + NUM_STEPS
    for epoch in epochs(*arguments, **options):
        # Nothing stops the run earlier, so ``is_over`` is always False: then Epoch refuses a second pass over its
        # batches, as in a run.
        yield Epoch(epoch.number, len(epoch), marked(islice(epoch, num_left)), is_over=lambda: False)
        num_left -= len(epoch)
        if num_left <= 0:
            return


@contextmanager
def _marked(owner: type, name: str, phase: str, wait_for_device: Callable[[], None]) -> Iterator[None]:
    """Mark each call of the method ``name`` of ``owner`` in this context as a ``phase`` in the trace.

    ``wait_for_device`` is called before a phase, for the work of the one before it, and at its end, for its own.
    """
    method = getattr(owner, name)
    is_within = False

    @wraps(method)
    def marked(*arguments: Any, **options: Any) -> Any:
        # While the loop is watched (loop_watch.py), torch hands the call to the watch first, which then calls the
        # method of the class, so this function, once more. Only the outer call is marked.
        nonlocal is_within
        if is_within:
            return method(*arguments, **options)
        is_within = True
        try:
            wait_for_device()
            with record_function(phase):
                result = method(*arguments, **options)
                wait_for_device()
            return result
        finally:
            is_within = False

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextmanager
def _marked_optimizers(wait_for_device: Callable[[], None]) -> Iterator[None]:
    """Mark the steps of all optimizers in this context as a phase of the trace, by torch's own hooks."""
    # If one optimizer wraps another, a step lies within a step; the inner one ends first.
    phases: list[record_function] = []

    def begin(*_: object) -> None:
        phases.append(record_function(_OPTIMIZER))
        phases[-1].__enter__()

    def end(*_: object) -> None:
        wait_for_device()
        phases.pop().__exit__(None, None, None)

    with optimizer_hooks(begin, end):
        yield


def _ranges(profiler: torch_profiler.profile, *, on_gpu: bool) -> Ranges:
    """Return the intervals of the profiled steps in the profiler's events."""
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
