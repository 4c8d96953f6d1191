"""Runs on images in memory, in this process or in a few gloo processes, and what plain PyTorch computes of them."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import Block, CachedBlocks, LocalBatch, batches_from_cache
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.batch_plan import BatchPlan, ClassBalance
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.monitor.events import Event
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkippedImage, SuspiciousLabel
from raytrain.runs.outcome import Outcome
from raytrain.storage.open import open_store
from raytrain.training import assembly
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import Batch
from raytrain.training.loop import train
from raytrain.training.optimisation import learning_rate_factor
from raytrain.training.run import Run
from raytrain.training.run_spec import RunSpec
from tests.helpers.gloo_processes import end_groups_of_earlier_runs, run_in_processes
from tests.helpers.reference_loop import SliceBatchNorm, small_net, train_alone

NUM_CLASSES, SIDE = 4, 8
CLASSES = tuple("abcd")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def config(**options: Any) -> ResolvedConfig:
    base = {
        "name": "run",
        "device": "cpu",
        "model": "tests.helpers.memory_runs:network",
        "image_size": (SIDE, SIDE),
        "epochs": 2,
        "batch_size": 16,
        "learning_rate": 0.1,
        "log_every": 1,
        "precision": "float64",
        "mean": MEAN,
        "std": STD,
        "flip": "random",
        "translate": 2,
        "evaluate_every": 1,
        "workers": 1,
    }
    return ResolvedConfig(**{**base, **options})


def network(num_classes: int, channels: int) -> nn.Module:
    return small_net(nn.BatchNorm2d, channels, num_classes)


def network_without_norm(num_classes: int, channels: int) -> nn.Module:
    return small_net(lambda width: nn.Identity(), channels, num_classes)


def images(num_samples: int, bad: tuple[int, ...] = ()) -> Block:
    random = np.random.default_rng(0)
    labels = random.integers(0, NUM_CLASSES, num_samples)
    pixels = random.integers(0, 256, (num_samples, SIDE, SIDE, 3), dtype=np.uint8) // 2 + (labels * 30)[
        :, None, None, None
    ].astype(np.uint8)
    labels[list(bad)] = -1
    return Block(pixels, labels, np.arange(num_samples))


class MemorySource:
    def __init__(self, block: Block, spec: RunSpec, rank: int, loads: tuple[float, ...]) -> None:
        plan = spec.plan
        self.partition = Partition(plan, rank, loads)
        self.validation_partition = Partition(spec.held_out_plans["validation"], rank, loads)
        in_order = plan.samples_once(0, np.arange(plan.num_samples))
        ordered = Block(block.images[in_order], block.labels[in_order], in_order)
        rows = [slice(i, i + 5) for i in range(0, len(block), 5)]
        blocks = [Block(ordered.images[r], ordered.labels[r], ordered.draws[r]) for r in rows]
        self.blocks = CachedBlocks(blocks.__getitem__, CacheOrder(plan, 0, 5))

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return batches_from_cache(self.partition, self.blocks, first_step)

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        return batches_from_cache(self.validation_partition, self.blocks, 0)

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        return [f"{part}/{sample}.png" for sample in samples]


class Recorder:
    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[MetricRow] = []
        self.events: list[Event] = []
        self.asked = 0
        self.stop_after = stop_after
        self.started_after: list[int] = []
        self.skipped: list[SkippedImage] = []
        self.on_cpu: Counter[str] = Counter()

    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None:
        self.started_after.append(step)

    def flush(self) -> None: ...
    def note_retries(self, num_requests: int) -> None: ...
    def note_machine_use(self, use: MachineUse) -> None: ...
    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None: ...
    def replace_suspicious_labels(self, labels: Sequence[SuspiciousLabel]) -> None: ...

    def note_skipped(self, images: list[SkippedImage]) -> None:
        self.skipped += images

    def note_decoded_on_cpu(self, num_images: int, reason: str) -> None:
        self.on_cpu[reason] += num_images

    def note_event(self, event: Event) -> None:
        self.events.append(event)

    def record(self, row: MetricRow) -> None:
        self.rows.append(row)

    def stop_requested(self) -> bool:
        self.asked += 1
        return self.stop_after is not None and self.asked > self.stop_after

    def checkpoint_requested(self) -> bool:
        return False


def make_run(
    options: ResolvedConfig,
    block: Block,
    folder: str,
    recorder: Recorder,
    weights: dict[str, torch.Tensor] | None = None,
    class_weights: tuple[float, ...] | None = None,
) -> Run:
    """Return this worker's part of a run, restored from the checkpoint in ``folder``. Those before are over."""
    end_groups_of_earlier_runs()
    spec = make_spec(options, block, folder, class_weights)
    distributed = torch.distributed.is_initialized()
    rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    source = MemorySource(block, spec, rank, options.worker_load or (1.0,) * world_size)
    return assembly.make_run(spec, source, recorder, torch.device(options.device), weights)


def make_spec(
    options: ResolvedConfig, block: Block, folder: str, class_weights: tuple[float, ...] | None = None
) -> RunSpec:
    plan = make_plan(options, len(block))
    if options.sampling == "balanced":
        plan = dataclasses.replace(plan, balance=ClassBalance.of(block.labels))
    return RunSpec(
        config=options,
        loop=None,
        classes=CLASSES,
        manifest_digest="digest",
        plan=plan,
        held_out_plans={"validation": dataclasses.replace(plan, batch_size=6, epochs=1, max_steps=None, balance=None)},
        store=open_store(folder),
        class_weights=class_weights,
    )


def make_plan(options: ResolvedConfig, num_samples: int) -> BatchPlan:
    size, steps = options.batch_size, options.max_steps
    assert options.accumulate != "auto"
    return BatchPlan(num_samples, size, options.epochs, options.seed, max_steps=steps, accumulate=options.accumulate)


Seen = tuple[int, torch.Tensor, torch.Tensor]
"""What a worker was given in a microbatch: the step, samples (m,), and the network's input (m, C, H, W)."""


@dataclass(frozen=True)
class Case:
    """One run: its options, its images (``bad`` ones cannot be read), and the steps before a stop request."""

    options: ResolvedConfig
    num_samples: int = 70
    bad: tuple[int, ...] = ()
    stop_after: int | None = None
    folder: str | None = None


def on_one_worker(cases: dict[str, Case], fresh: str) -> dict[str, dict[str, Any]]:
    """Run every case in this process. Runs take milliseconds, while processes take seconds to start."""
    results = {}
    for name, case in cases.items():
        recorder = Recorder(case.stop_after)
        run = make_run(case.options, images(case.num_samples, case.bad), case.folder or f"{fresh}/{name}", recorder)
        seen = note_microbatches(run)
        outcome = trained(run)
        state = {key.removeprefix("module."): value.cpu().clone() for key, value in weights_of(run).items()}
        results[name] = {"state": state, "rows": recorder.rows, "seen": seen, "outcome": outcome}
    return results


def trained(run: Run, loop: Callable[[Run], None] = train) -> Outcome:
    """Train ``run`` to its end, or until it is asked to stop, as a worker does."""
    with run.steps.optimizers.followed():
        loop(run)
        return run.finish()


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights on this worker of the first network that the loop of ``run`` has prepared."""
    return run.models.trained[0].state_dict()


def note_microbatches(run: Run) -> list[Seen]:
    """Record the images of which the built-in loop shows its answers, without placeholders for unreadable ones."""
    show, seen = run.show, []

    def noted(batch: Batch, logits: torch.Tensor) -> None:
        if not run.evaluating:
            seen.append((batch.step, batch.samples[: batch.num_used], batch.images[: batch.num_used].clone()))
        show(batch, logits)

    run.show = noted
    return seen


def together(cases: dict[str, Case], world_size: int) -> list[dict[str, dict[str, Any]]]:
    """Run every case on ``world_size`` workers, and return the results by rank and name."""
    with tempfile.TemporaryDirectory() as fresh:
        return run_in_processes(world_size, on_one_worker, cases, fresh)


def alone(case: Case, world_size: int = 1) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Train a case in one plain PyTorch process; ``world_size`` only matters to batch norm "aggregate"."""
    options = case.options
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(options, images(case.num_samples), folder, Recorder())
        model = run.build_model()
    if options.batch_norm == "aggregate":
        model = with_slice_batch_norm(model)
    model.to(options.device, torch.float64 if options.precision == "float64" else torch.float32)
    optimizers = {
        "sgd": lambda: torch.optim.SGD(
            model.parameters(), 1.0, momentum=options.momentum, weight_decay=options.weight_decay
        ),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), 1.0, weight_decay=options.weight_decay),
    }
    plan, peak = run.plan, options.learning_rate
    rates = [
        peak * learning_rate_factor(options, step, plan.steps_per_epoch, plan.num_steps)
        for step in range(plan.num_steps)
    ]
    loads = options.worker_load or (1.0,) * world_size
    batches = plain_batches(
        run, images(case.num_samples, case.bad), loads if options.batch_norm == "aggregate" else (1.0,)
    )
    rows = train_alone(model, optimizers[options.optimizer](), batches, rates, options.label_smoothing)
    return model.cpu(), rows


@torch.no_grad()
def measured(model: nn.Module, case: Case) -> tuple[float, float]:
    """Return the accuracy and loss of all readable images in one batch."""
    block = images(case.num_samples, case.bad)
    labels = torch.from_numpy(block.labels)
    logits = model.eval()(Augment(case.options).evaluate(torch.from_numpy(block.images)))
    used = labels >= 0
    correct = (logits.argmax(1) == labels)[used].double().mean().item()
    return correct, nn.functional.cross_entropy(logits[used], labels[used]).item()


def with_slice_batch_norm(model: nn.Module) -> nn.Module:
    """Replace the batch norms of a network by those that normalise each slice."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            norm = SliceBatchNorm(layer.num_features)
            norm.load_state_dict(layer.state_dict())
            setattr(model, name, norm)
    return model


def plain_batches(
    run: Run, block: Block, loads: tuple[float, ...]
) -> Iterator[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Yield the global batches as microbatches (the first get the remainder) of workers' slices, without empty ones."""
    for step in range(run.plan.num_steps):
        batch = run.plan.batch(step)
        chosen = run.plan.draws(batch.epoch, np.arange(batch.start, batch.stop))
        microbatches = [_split(draws, loads) for draws in _split(chosen, (1.0,) * run.plan.accumulate)]
        readable = [[samples[block.labels[samples] >= 0] for samples in slices] for slices in microbatches]
        yield [
            [_augmented(run, block, samples, batch.epoch) for samples in slices if len(samples)]
            for slices in readable
            if any(map(len, slices))
        ]


def _split(samples: Any, loads: tuple[float, ...]) -> list[Any]:
    """Split in proportion to ``loads``, rounded down, with one sample more for the first workers that are not idle."""
    sizes = [int(len(samples) * load / sum(loads) + 1e-9) for load in loads]
    for rank in [rank for rank, load in enumerate(loads) if load][: len(samples) - sum(sizes)]:
        sizes[rank] += 1
    return np.split(samples, np.cumsum(sizes)[:-1])


def _augmented(run: Run, block: Block, samples: Any, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = run.augment.train(torch.from_numpy(block.images[samples]).to(run.device), samples, epoch)
    return pixels, torch.from_numpy(block.labels[samples]).to(run.device)


def assert_same(
    name: str, result: dict[str, Any], case: Case, expected: tuple[nn.Module, list[dict[str, Any]]], *, check_rows: bool
) -> None:
    model, rows = expected
    tolerance = 1e-5 if case.options.precision == "float32" else 1e-10
    for key, value in model.state_dict().items():
        difference = (result["state"][key].double() - value.double()).abs().max().item()
        assert difference <= tolerance, f"{name}: {key} differs by {difference}"
    steps = [row for row in result["rows"] if row.kind == "step"]
    if check_rows:
        both = list(zip(steps, rows, strict=True))
        assert all(step.loss is step.accuracy is None for step, row in both if not row["count"]), name
        both = [(step, row) for step, row in both if row["count"]]
        losses, accuracies = ([row[key] for _, row in both] for key in ("loss", "accuracy"))
        assert [step.loss for step, _ in both] == pytest.approx(losses, rel=0, abs=10 * tolerance), name
        assert [step.accuracy for step, _ in both] == pytest.approx(accuracies), name
        assert steps[-1].samples_seen == result["outcome"].progress.samples_seen == sum(row["count"] for row in rows), (
            name
        )
