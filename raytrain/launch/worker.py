"""A worker without Ray: its process group, its device and its part of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.dataset import Dataset
from raytrain.launch.cache_choice import ImageCache
from raytrain.launch.local.calls import CallAddress
from raytrain.launch.machine_batches import MachineBatches
from raytrain.launch.placement import cores
from raytrain.launch.prepare import Loop, load_initial_weights, run_spec
from raytrain.runs.metric_row import SkippedImage
from raytrain.runs.outcome import Outcome
from raytrain.storage.store import Store
from raytrain.training.protocols import Reporter


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """A run as its workers, and the agent that starts them, get it. ``folder`` is for their files. Holds no secret.

    ``loop`` is the caller's own; None if the options name one, or none.
    """

    config: ResolvedConfig
    loop: Loop | None
    data: Dataset
    store: Store  # of the run
    first_step: int
    num_workers: int
    cache: ImageCache
    calls: CallAddress
    folder: str


class WorkerReporter(Reporter, Protocol):
    """A reporter that is also told whether a worker can train, and which images it cannot use."""

    def checked(self) -> None:
        """The network and its weights fit together: the run may be written down. Only worker 0 says so."""
        ...

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that cannot be used."""
        ...


def train_worker(task: WorkerTask, loop: Loop | None, device: torch.device, reporter: WorkerReporter) -> Outcome:
    """Train as one of the default process group's workers, or as the only one. The outcome is the same on all of them.

    Raises UsageError if the network, its weights or a checkpoint do not fit.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spec = run_spec(task.config, task.data, task.store, loop, world_size)
    loads = task.config.worker_load or (1.0,) * world_size
    isolated = task.config.resume or _was_restarted()  # an image may have ended the run, or its workers, before
    source = MachineBatches(task.data, spec.plan, rank, loads, task.cache, reporter.skip, isolated=isolated)
    weights = load_initial_weights(spec, task.first_step)
    if rank == 0:
        reporter.checked()
    return spec.train(spec.make_run(source, reporter, device, weights))


def worker_device(config: TrainConfig) -> torch.device:
    """This worker's device: a GPU of its own, or its share of the cores."""
    if config.device_type == "cpu" or not torch.cuda.is_available():
        num_workers = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(config.threads_per_worker or max(1, cores() // num_workers))
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def collective_backend(device: torch.device) -> str:
    """The implementation of torch.distributed for ``device``."""
    return dist.Backend.NCCL if device.type == "cuda" else dist.Backend.GLOO


def _was_restarted() -> bool:
    """Whether the agent that started this process started other ones before, and one of them failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
