"""Where a training step's time goes: trains a few steps on this machine under torch.profiler."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from raytrain.backends.prepare import load_loop
from raytrain.backends.train import train
from raytrain.config import TrainConfig
from raytrain.diagnostics.step_phases import PHASES
from raytrain.storage.tempdir import TemporaryFolder

if TYPE_CHECKING:
    from raytrain.training.run import Run

_MANY_EPOCHS = 1000
"""The loop ends the run, not the plan; an epoch may have a single step."""


@dataclass(frozen=True)
class ProfileResult:
    """Where the time of a step goes, on average over the profiled steps."""

    workers: tuple[dict[str, float], ...]
    """Seconds of each phase, for each worker."""
    traces: tuple[str, ...]
    """A Chrome trace of each worker: chrome://tracing and https://ui.perfetto.dev open it."""
    advice: str

    @property
    def step_s(self) -> float:
        """Seconds of a step: the mean of the workers'."""
        return mean(sum(worker.values()) for worker in self.workers)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase: the means of the workers'."""
        return {name: mean(worker[name] for worker in self.workers) for name in PHASES}

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        return {**dataclasses.asdict(self), "step_s": self.step_s, "phases": self.phases}


def profile(
    config: TrainConfig, *, output: str = "profile", loop: Callable[[Run], None] | None = None
) -> ProfileResult:
    """Train a few steps of a run on this machine, without Ray, and say where their time goes.

    Args:
        config: the options of the run, of which nothing but the traces is kept.
        output: folder for the traces.
        loop: a training loop to use instead of the built-in one or the one that ``config`` names.

    Raises what :func:`raytrain.train` raises.
    """
    from raytrain.diagnostics.profiled_loop import profiled_loop

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to standard error without a GPU
    folder = Path(output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-*.json*"):
        old.unlink()
    with TemporaryFolder() as storage:
        short = _short_run(config, str(storage / "runs"))
        train(short, loop=partial(profiled_loop, loop=load_loop(config, loop), folder=str(folder)))
    files = sorted(folder.glob("worker-*[0-9].json"), key=lambda file: int(file.stem.partition("-")[2]))
    workers = tuple(json.loads(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    result = ProfileResult(workers, tuple(str(file.with_suffix(".trace.json.gz")) for file in files), "")
    return dataclasses.replace(result, advice=advice(result.phases, config))


def _short_run(config: TrainConfig, storage: str) -> TrainConfig:
    """The same training on this machine, without anything beside the steps, and with enough of them."""
    return dataclasses.replace(
        config,
        name="profile",
        storage=storage,
        backend="local",
        address=None,
        scope_keys=False,
        wait_for_machines_s=0.0,
        workers=config.workers if config.elastic_workers is None else "auto",
        resume=False,
        epochs=_MANY_EPOCHS,
        max_steps=None,
        max_failures=0,
        until=None,
        patience=None,
        max_time=None,
        evaluate_every=0,
        checkpoint_every=(),
        trace=False,
        track=(),
    )


def advice(phases: dict[str, float], config: TrainConfig) -> str:
    """One sentence on what would make the steps of a run with these ``phases`` (in seconds) faster."""
    step_s = sum(phases.values())
    part = {name: f"{seconds / step_s:.0%} of a step" for name, seconds in phases.items()}
    share = {name: seconds / step_s for name, seconds in phases.items()}
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
    return _advice_on_computing(f"{share['forward'] + share['backward']:.0%} of a step", config)


def _advice_on_computing(part: str, config: TrainConfig) -> str:
    flags = [
        *(["--precision auto"] if config.precision in ("float32", "tf32", "float64") else []),
        *([] if config.channels_last else ["--channels-last"]),
        *([] if config.compile else ["--compile"]),
    ]
    hint = f"try {' and '.join(flags)}" if flags else "more workers or a smaller network would make it faster"
    return f"The network itself takes {part}: {hint}."
