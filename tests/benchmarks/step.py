"""A whole training step: raytrain's loop on cached images, compared with a plain DDP loop on tensors in memory.

Both train the recipe's network on the same images with the same augmentation, in two gloo processes of one thread each.
Both are also measured on Ray: raytrain as users run it, and the plain loop in a bare TorchTrainer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from raytrain import models
from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.blocks import Block, CachedBlocks, LocalBatch, batches_from_cache
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.monitor.events import Event
from raytrain.recipes import cifar10
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkippedImage, SuspiciousLabel
from raytrain.storage.open import open_store
from raytrain.training.assembly import make_run, train_run
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.loop import train
from raytrain.training.networks.mixed_precision import AUTOCAST_DTYPES
from raytrain.training.run import Run
from raytrain.training.run_spec import RunSpec
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.benchmarks.subset import train_on
from tests.helpers.gloo_processes import run_in_processes

NUM_WORKERS, BATCH_PER_WORKER, BLOCK_ROWS, NUM_CLASSES = 2, 128, 512, 10
BATCH = NUM_WORKERS * BATCH_PER_WORKER
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
WARM_UP = 5
Images = np.ndarray[Any, np.dtype[np.uint8]]  # (n, H, W, C)
Labels = np.ndarray[Any, np.dtype[np.int64]]  # (n,)


def measure(bench: Bench) -> Report:
    steps = WARM_UP + bench.scaled(35, least=4)
    images = str(bench.scratch / "images.npz")
    bench.alone(Side(keep_images, {"url": bench.url, "num_images": steps * BATCH, "file": images}))
    float32, bfloat16 = ({"images": images, "precision": precision} for precision in ("float32", "bfloat16"))
    sides = {
        "float32, plain": Side(plainly, float32),
        "float32, raytrain": Side(through_raytrain, float32),
        "float32, plain under Ray": Side(plainly_under_ray, float32),
        "float32, raytrain under Ray": Side(
            through_ray, {"url": bench.url, "num_images": steps * BATCH, "precision": "float32"}
        ),
        "bfloat16, plain": Side(plainly, bfloat16),
        "bfloat16, raytrain": Side(through_raytrain, bfloat16),
    }
    results = bench.alternate(sides, bench.scaled(3), lambda times: f"{rate(times):,.0f} images/s")
    figures = {name: Figure(name, "images/s", [rate(times) for times in rounds]) for name, rounds in results.items()}
    checks = [_check(figures, name, name.replace("raytrain", "plain")) for name in figures if "raytrain" in name]
    title = f"step: cifar10's network, 2 processes of 1 thread, {BATCH_PER_WORKER} images each, {steps - WARM_UP} steps"
    return Report(title, list(figures.values()), checks)


def _check(figures: dict[str, Figure], name: str, beside: str) -> Check:
    return Check(f"{name} : {beside}", figures[name].median / figures[beside].median, at_least=0.95)


def rate(times: list[float]) -> float:
    """Return the images per second of both workers, from the times at which one worker finished its steps."""
    return BATCH * (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1])


def _options(precision: Any, **others: Any) -> TrainConfig:
    quiet: dict[str, Any] = {"evaluate_every": 0, "checkpoint_every": ()}
    return cifar10(
        precision=precision,
        epochs=1,
        workers=NUM_WORKERS,
        batch_size=f"{BATCH_PER_WORKER}/worker",
        mean=MEAN,
        std=STD,
        **quiet,
        **others,
    )


def _resolved(precision: Any, **others: Any) -> ResolvedConfig:
    options = _options(precision, **others)
    return options.resolve(name="step", num_workers=NUM_WORKERS, device="cpu", mean=MEAN, std=STD)


def keep_images(url: str, num_images: int, file: str) -> None:
    """Write some images and their labels to a file, for the sides without Ray."""
    store = open_store(url)
    manifest = build_manifest(store)
    chosen = _some(num_images, len(manifest))
    images, _ = ImageReader(store, ImageShape(32, 32, 3)).read(manifest.select(chosen))
    np.savez(file, images=images, labels=manifest.labels[chosen].astype(np.int64))


def _some(num_images: int, manifest_size: int) -> Any:
    """Return ``num_images`` random indices into a manifest; they repeat if it has fewer images."""
    return np.resize(np.random.default_rng(0).permutation(manifest_size), num_images)


def _step_times() -> list[float]:
    """Return a list to which each optimizer step in this process will append its time."""
    times: list[float] = []
    register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
    return times


# The plain loop.


def plainly(images: str, precision: str) -> list[float]:
    return run_in_processes(NUM_WORKERS, train_plainly, images, precision)[0]


def plainly_under_ray(images: str, precision: str, folder: str) -> list[float]:
    """Run the plain loop in a bare TorchTrainer, so that Ray's processes use the cores on both sides."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop() -> None:
        torch.set_num_threads(1)
        times = train_plainly(images, precision)
        if dist.get_rank() == 0:
            Path(folder, "times").write_text(json.dumps(times))

    ray.init("local", include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        loop, scaling_config=ScalingConfig(num_workers=NUM_WORKERS), run_config=RunConfig(storage_path=folder)
    ).fit()
    return json.loads(Path(folder, "times").read_text())


def train_plainly(file: str, precision: str) -> list[float]:
    times, rank, config = _step_times(), dist.get_rank(), _resolved(precision)
    with np.load(file) as arrays:
        all_images, all_labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    augment = Augment(config)
    torch.manual_seed(0)
    model = DistributedDataParallel(models.cifar10(NUM_CLASSES, 3).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=config.momentum, weight_decay=config.weight_decay)
    mixed = torch.autocast("cpu", AUTOCAST_DTYPES[precision]) if precision in AUTOCAST_DTYPES else nullcontext()
    order = torch.randperm(len(all_images))
    for step in range(len(order) // BATCH):
        samples = order[step * BATCH + rank * BATCH_PER_WORKER :][:BATCH_PER_WORKER]
        images, labels = augment.train(all_images[samples], samples.numpy(), epoch=0), all_labels[samples]
        with mixed:
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return times


# raytrain's loop without Ray.


@dataclass(frozen=True)
class MemorySource:
    """A data source that takes local batches from blocks in memory, as they are in the object store."""

    images: Images  # in the order of the first epoch
    labels: Labels
    partition: Partition

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        order = CacheOrder(self.partition.plan, 0, BLOCK_ROWS)
        return batches_from_cache(self.partition, CachedBlocks(self._block, order), first_step)

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        one_batch = BatchPlan(len(self.images), self.partition.plan.batch_size, 1, 0, max_steps=1)
        return batches_from_cache(
            Partition(one_batch, self.partition.rank, self.partition.loads),
            CachedBlocks(self._block, CacheOrder(one_batch, 0, BLOCK_ROWS)),
            0,
        )

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        return list(map(str, samples))

    def _block(self, number: int) -> Block:
        rows = slice(number * BLOCK_ROWS, (number + 1) * BLOCK_ROWS)
        return Block(self.images[rows], self.labels[rows], np.empty(0, np.int64))


class Silent:
    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None: ...
    def record(self, row: MetricRow) -> None: ...
    def note_event(self, event: Event) -> None: ...
    def note_machine_use(self, use: MachineUse) -> None: ...
    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None: ...
    def replace_suspicious_labels(self, labels: Sequence[SuspiciousLabel]) -> None: ...
    def note_skipped(self, images: list[SkippedImage]) -> None: ...
    def note_decoded_on_cpu(self, num_images: int, reason: str) -> None: ...
    def flush(self) -> None: ...

    def stop_requested(self) -> bool:
        return False

    def checkpoint_requested(self) -> bool:
        return False


def through_raytrain(images: str, precision: str, folder: str) -> list[float]:
    return run_in_processes(NUM_WORKERS, train_in_memory, images, {"precision": precision}, folder)[0]


def train_in_memory(
    file: str, options: dict[str, Any], folder: str, loop: Callable[[Run], None] | None = None
) -> list[float]:
    with np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    spec, run = run_in_memory(_resolved(**options), images, labels, folder, loop)
    times = _step_times()
    train_run(spec, run)
    return times


def run_in_memory(
    config: ResolvedConfig, images: Images, labels: Labels, folder: str, loop: Callable[[Run], None] | None = None
) -> tuple[RunSpec, Run]:
    """This process's part of a run on images in memory, on the device that the options name."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = BatchPlan(len(images), config.batch_size, config.epochs, config.seed, max_steps=config.max_steps)
    spec = RunSpec(
        config=config,
        loop=loop,
        classes=tuple(map(str, range(NUM_CLASSES))),
        manifest_digest="",
        plan=plan,
        held_out_plans={"validation": plan},
        store=open_store(folder),
    )
    source = MemorySource(images, labels, Partition(plan, rank, (1.0,) * world_size))
    return spec, make_run(spec, source, Silent(), torch.device(config.device))


# raytrain's loop under Ray.


def through_ray(url: str, num_images: int, precision: str, folder: str) -> list[float]:
    options: dict[str, Any] = {
        "data": url,
        "validation_fraction": 0.001,
        "storage": folder,
        "name": "step",
        "cache": "memory",
    }
    config = _options(precision, device="cpu", threads_per_worker=1, **options)
    train_on(config, partial(_some, num_images), partial(train_when_cached, folder=folder))
    return json.loads(Path(folder, "times").read_text())


def train_when_cached(run: Run, folder: str) -> None:
    run.reporter.note_start(run.world_size, 0)  # The driver waits for this before it fills the cache.
    for _ in run.batches.source.train(0):  # Wait until all images are cached.
        pass
    times = _step_times()
    train(run)
    if run.rank == 0:
        Path(folder, "times").write_text(json.dumps(times))
