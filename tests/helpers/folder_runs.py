"""Runs on the images of a folder in a few gloo processes, without Ray, and the weights they end with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain import TrainConfig
from raytrain.data.dataset import open_dataset
from raytrain.data.plan.partition import CacheOrder
from raytrain.loader.choose_cache import ImageCache
from raytrain.loader.machine_batches import MachineBatches
from raytrain.loader.transform_processes import transformed
from raytrain.runs.documents import run_store
from raytrain.training.assembly import load_initial_weights, make_run, train_run
from raytrain.training.run import Run
from raytrain.training.run_spec import RunSpec
from tests.helpers.gloo_processes import end_groups_of_earlier_runs, run_in_processes
from tests.helpers.memory_runs import Recorder, weights_of
from tests.helpers.small_runs import config as small_config

Weights = dict[str, Tensor]

_ROWS_PER_BLOCK = 512


@dataclass(frozen=True)
class FolderRun:
    """A run's options, and the steps after which it is asked to stop."""

    config: TrainConfig
    stop_after: int | None = None
    loop: Callable[[Run], None] | None = None


def folder_run(
    images: Path,
    storage: Path,
    name: str,
    *,
    stop_after: int | None = None,
    loop: Callable[[Run], None] | None = None,
    **options: Any,
) -> FolderRun:
    """A small run; the options are those of ``tests.helpers.small_runs.config`` with some changed."""
    return FolderRun(small_config(images, storage, **{"name": name, "epochs": 2, **options}), stop_after, loop)


def train_runs(world_size: int, *runs: FolderRun) -> list[Weights]:
    """Train each run on ``world_size`` workers, from its checkpoint if it has one; the weights of the first worker."""
    return run_in_processes(world_size, _train_all, runs)[0]


def _train_all(runs: tuple[FolderRun, ...]) -> list[Weights]:
    return [train_here(run)[0] for run in runs]


def train_here(run: FolderRun, recorder: Recorder | None = None) -> tuple[Weights, Recorder]:
    """Train a run as one worker of the current process group, if there is one."""
    end_groups_of_earlier_runs()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert run.config.name is not None
    store = run_store(run.config.storage, run.config.name)
    data = open_dataset(run.config, store)
    resolved = run.config.resolve(
        name=run.config.name, num_workers=world_size, device="cpu", mean=data.mean, std=data.std
    )
    spec = RunSpec.of(resolved, data, store, run.loop, world_size).with_functions()
    train = None if resolved.crops_originals else CacheOrder(spec.plan, 0, _ROWS_PER_BLOCK)
    test = CacheOrder(spec.held_out_plans["validation"], 0, _ROWS_PER_BLOCK)
    cache = ImageCache(train, test, folder=tempfile.mkdtemp(dir=run.config.storage))
    recorder = recorder or Recorder(run.stop_after)
    loads = (1.0,) * world_size
    with (
        MachineBatches(data, spec.plan, rank, loads, cache, recorder, isolated=False) as source,
        transformed(source, resolved, spec.transforms) as images,
    ):
        part = make_run(spec, images, recorder, torch.device("cpu"), load_initial_weights(spec, 0))
        train_run(spec, part)
    return {name.removeprefix("module."): value.clone() for name, value in weights_of(part).items()}, recorder


def evaluation_losses(images: Path, storage: Path, name: str, **given: Any) -> list[float | None]:
    """Train a :func:`folder_run` in this process, and return the loss of each of its evaluations."""
    _, recorder = train_here(folder_run(images, storage, name, **given))
    return [row.metrics["loss"] for row in recorder.rows if row.kind == "evaluation"]


def largest_difference(some: Weights, others: Weights) -> float:
    """The largest difference between two networks' weights."""
    return max((some[name].double() - others[name].double()).abs().max().item() for name in some)
