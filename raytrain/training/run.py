"""What a training loop is given: its batches, and the few operations that make N workers compute what one would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.local_batch import LocalBatch
from raytrain.data.permutation import mix
from raytrain.data.prefetch import Prefetch
from raytrain.errors import UsageError
from raytrain.training import batchnorm, lr_schedule, transfer
from raytrain.training.augment import Augment
from raytrain.training.batch import Batch, to_batch
from raytrain.training.checkpoint import Checkpoints, Progress
from raytrain.training.evaluation import evaluate as evaluate_model
from raytrain.training.loop_validator import LoopValidator
from raytrain.training.malloc import keep_freed_memory
from raytrain.training.optimizer import build_optimizer
from raytrain.training.protocols import BatchSource, Reporter
from raytrain.training.sample_trace import Trace
from raytrain.training.state import CheckpointState
from raytrain.training.step_metrics import StepMetrics
from raytrain.training.step_reduce import StepReduce, StepTotals, StepVote
from raytrain.training.wrap_model import wrap

T = TypeVar("T")


@dataclass
class Run:
    """One worker's part of a training run."""

    config: TrainConfig
    classes: tuple[str, ...]
    plan: BatchPlan
    source: BatchSource
    augment: Augment
    checkpoints: Checkpoints
    reporter: Reporter
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    weights: Mapping[str, Tensor] | None = None  # what the network begins with; None: what the seed or a checkpoint decides
    clock: Callable[[], float] = time.monotonic
    progress: Progress = field(default_factory=Progress)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if self.device.type == "cpu":
            keep_freed_memory()
        self._models: list[nn.Module] = []
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.precision == "float16")  # pyright: ignore
        self._sums = StepReduce(self.device, self.world_size)
        self._validator = LoopValidator()
        self._part: Batch | None = None
        self._rate = 0.0
        self._saved_at = self.clock()
        self._over = False
        self._announced = False
        self._kept = CheckpointState(self._restore())
        self._saved_step = self.progress.step
        self._trace = Trace(self.checkpoints.store, self.rank, self.progress.step) if self.config.trace else None
        self._kept.add("scaler", self._scaler)
        self._metrics = StepMetrics(self.world_size, self.progress.samples_seen)
        torch.manual_seed(mix(self.config.seed) >> 1)  # a loop's own networks begin the same on every worker, and every time
        self._evaluate: Callable[[], dict[str, float]] = lambda: evaluate_model(self, self._models[0])

    # What a loop calls.

    @property
    def num_classes(self) -> int:
        """Number of classes, the width of a classifier's output."""
        return len(self.classes)

    def build_model(self) -> nn.Module:
        """The network that the configuration names, with the weights that it names or its seed decides, and the layers that it freezes."""
        model = transfer.initial_model(self.config, self.num_classes, self.weights)
        transfer.freeze(model, self.config.freeze)
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer that the configuration names, over the parameters of ``model``."""
        return build_optimizer(self.config, model, self.num_classes)

    def prepare(self, thing: T) -> T:
        """Take ``thing`` into the run: every checkpoint holds it, and on a resume it comes back as the checkpoint has it.

        A network is put on the device, and its batch norm and gradients are joined over the workers: train what is returned.
        An optimizer is made over what has been returned. Anything else has ``state_dict`` and ``load_state_dict``, such as an
        average of the weights. A loop prepares the same things in the same order each time.
        """
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing)  # pyright: ignore[reportReturnType]
        self._kept.add("optimizer" if isinstance(thing, Optimizer) else "state", thing)
        return thing

    def batches(self, evaluate: Callable[[], dict[str, float]] | None = None) -> Iterator[Batch]:
        """This worker's shares, from where the run stands; ends on every worker after the same step.

        Between two batches it evaluates, writes checkpoints and sees whether somebody asked for a stop.

        Args:
            evaluate: measures the run in place of the built-in evaluation (``raytrain/training/evaluation.py``), on every
                worker; gives numbers by name, those of ``accuracy`` and ``loss`` for the run's summary.
        """
        self._evaluate = evaluate or self._evaluate
        self._kept.check_complete()
        self._train_mode()
        if self._evaluation_is_due() and self.progress.evaluated_step != self.progress.step:
            self.evaluate()  # a stop came between
        first_step = self.progress.step
        shares = Prefetch(self.source.train(first_step), self.config.prefetch)
        try:
            for step in range(first_step, self.plan.num_steps):
                yield self._begin(step, shares)
                self._announce()  # not before: the driver now starts to read ahead, which would hold up the first step
                if self._complete():
                    break
        finally:
            shares.close()
        self._over = True

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The parts of ``batch`` that ``--accumulate`` asks for: backpropagate each, then step once.

        The gradients are the whole global batch's. Batch norm sees each part as a batch, the same on any number of workers.
        """
        for number, self._part in enumerate(batch.parts(), start=1):
            for model in self._models:
                batchnorm.set_used(model, self._part.num_used)
                model.require_backward_grad_sync = number == len(batch.part_sizes)  # pyright: ignore[reportArgumentType]
            yield self._part
            if number < len(batch.part_sizes):
                self._finish_norms()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate ``loss``, a sum over the images of this worker's share, as part of the global batch's mean.

        With m_j used images on worker j and M of them in all, the gradient becomes Σ_j Σ_i ∂ℓ_ij / M: the loss is scaled by
        N / M, for DistributedDataParallel averages over the N workers. Raises UsageError for a loss that is no such sum.
        """
        assert self._part is not None
        self._validator.backward(loss)
        weight = self.world_size / self._sums.used().clamp(min=1) * (self._part.num_used > 0)
        self._scaler.scale(loss * weight.to(loss.dtype)).backward()

    def step(self, optimizer: Optimizer, *, learning_rate: float | None = None, clip_norm: float | None = None) -> None:
        """Step the optimizer and clear its gradients.

        Args:
            optimizer: one that was prepared.
            learning_rate: of this step; by default what the optimizer was made with, times the factor of ``--schedule``.
            clip_norm: scale the gradients down to this Euclidean norm over all parameters where theirs is larger.
        """
        self._validator.step()
        factor = lr_schedule.factor(self.config, self.progress.step, self.plan.steps_per_epoch, self.plan.num_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor if learning_rate is None else learning_rate
        self._rate = optimizer.param_groups[0]["lr"]
        if clip_norm is not None:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], clip_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad()

    def log(self, **sums: Tensor) -> None:
        """Note sums over the images of this worker's share; their means over all images join the run's history.

        ``correct``, the number of right answers, becomes ``accuracy``; other names stay. Every worker notes the same names.
        """
        assert self._part is not None
        self._sums.add(sums, counts=self._part.num_used > 0)

    def test_batches(self) -> Iterator[Batch]:
        """This worker's part of the test images, each image on one worker, as they are: resized and normalised."""
        for share in self.source.test():
            if len(share.labels):
                yield to_batch(share, self.augment, self.device, training=False)

    def total(self, sums: Tensor) -> list[float]:
        """``sums``, of shape (n,), added up over the workers; each of them calls it."""
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure the run on the test images, at any moment, on every worker; the numbers join its history."""
        self._announce()  # or nobody would read the test images
        begun = time.perf_counter()
        for model in self._models:
            model.eval()
        measured = self._evaluate()
        self._train_mode()
        step = self.progress.step + self._validator.stepped  # the step under way is done when it has stepped
        accuracy, loss = measured.get("accuracy"), measured.get("loss")
        self.progress = replace(self.progress, test_accuracy=accuracy, test_loss=loss, evaluated_step=step)
        epoch = -(-step // self.plan.steps_per_epoch)
        self._report({"kind": "evaluation", "step": step, "epoch": epoch, **measured})
        self._metrics.pause(time.perf_counter() - begun)
        return measured

    def finish(self) -> None:
        """What whoever called the loop calls when it has returned: leave the last metrics and a checkpoint.

        Raises UsageError where only some workers have returned before the run's end.
        """
        if not self._over and self._validator.stepped:
            self._advance()  # the loop was left with this step done
        self._check_left(self._flush(StepVote(left=not self._over)))
        self.stopped = self.progress.step < self.plan.num_steps
        if self._models and self._saved_step != self.progress.step:
            self._save()
        self.checkpoints.close()

    # What happens between two batches.

    def _announce(self) -> None:
        """Tell, once, that the workers have started, and after which step."""
        if self.rank == 0 and not self._announced:
            self.reporter.started(self.world_size, self.progress.step)
        self._announced = True

    def _begin(self, step: int, shares: Iterator[LocalBatch]) -> Batch:
        waited = time.perf_counter()
        share = next(shares)
        wait_s = time.perf_counter() - waited
        due = 0 < self.config.checkpoint_every_s <= self.clock() - self._saved_at
        save = self.rank == 0 and (self.reporter.save_requested() or due)
        self._sums.begin(StepVote(len(share.labels), wait_s, stop=self.reporter.stop_requested(), save=save))
        self._share = share
        self._part = to_batch(share, self.augment, self.device, training=True)
        for model in self._models:
            batchnorm.set_used(model, self._part.num_used)
        self._validator.begin()
        torch.manual_seed(mix(self.config.seed, step, self.rank) >> 1)  # dropout repeats after a resume
        return self._part

    def _complete(self) -> bool:
        """Bring the books up to date after a step; whether the run stops here."""
        self._validator.complete()
        sums = self._advance()
        self._check_left(sums)
        ends_run = self.progress.step == self.plan.num_steps
        if sums.stop_votes > 0 and not ends_run:
            return True
        if ends_run or self._evaluation_is_due():
            self.evaluate()
        self._save_if_due(sums)
        return False

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluate_every * self.plan.steps_per_epoch
        return every > 0 and self.progress.step > 0 and self.progress.step % every == 0

    def _advance(self) -> StepTotals:
        self._finish_norms()
        self._validator.begin()
        sums = self._sums.read()
        self._report(self._metrics.step(sums))
        if self._trace is not None:
            self._trace.add(self._share.batch.step + 1, self._share.samples)
        self.progress = replace(self.progress, step=self._share.batch.step + 1, samples_seen=self._metrics.samples_seen)
        if self.progress.step % self.config.log_every == 0 or self.progress.step == self.plan.num_steps:
            self._metrics.close_row(self._share.batch, self._rate)
        return sums

    def _flush(self, vote: StepVote) -> StepTotals:
        """Fetch what was logged in the last step, which otherwise comes with the next one."""
        self._sums.begin(vote)
        sums = self._sums.read()
        self._report(self._metrics.step(sums))
        return sums

    def _finish_norms(self) -> None:
        for model in self._models:
            batchnorm.finish_step(model)

    def _check_left(self, sums: StepTotals) -> None:
        if 0 < sums.left < self.world_size:
            raise UsageError(
                f"After step {self.progress.step:,} the loop returned on {sums.left:.0f} of {self.world_size} workers and went on on the "
                "others; every worker must take the same steps: decide to break by what all of them know, such as run.total(...)."
            )

    def _save_if_due(self, sums: StepTotals) -> None:
        step = self.progress.step
        every = (self.config.checkpoint_every_steps, self.config.checkpoint_every_epochs * self.plan.steps_per_epoch)
        if sums.save_votes or any(each and step % each == 0 for each in every):
            self._flush(StepVote())  # a run that goes on from here records nothing of this step again
            self._save()

    def _save(self) -> None:
        self._saved_at, self._saved_step = self.clock(), self.progress.step
        if self._trace is not None:
            self._trace.write()
            if self.world_size > 1:
                dist.barrier()  # no checkpoint without the trace of all that led to it
        if self.rank == 0:
            self.checkpoints.save(self._kept.state_dict(), self.progress, first=self.reporter.flush)

    def _report(self, row: dict[str, Any] | None) -> None:
        if row is not None and self.rank == 0:
            self.reporter.record(row)

    # Networks.

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        batchnorm.convert(model, self.config.batch_norm)
        memory_format = torch.channels_last if self.config.channels_last else torch.preserve_format
        dtype = torch.float64 if self.config.precision == "float64" else torch.float32
        model.to(self.device, dtype, memory_format=memory_format)  # pyright: ignore
        self._kept.add("model", model)  # after the cast, which would round it
        wrapped = wrap(model, self.config, self.device, self.world_size)
        self._models.append(wrapped)
        return wrapped

    def _train_mode(self) -> None:
        for model in self._models:
            model.train()

    def _restore(self) -> dict[str, Any]:
        """State of the newest checkpoint (the one that worker 0 sees), and the progress it stands for."""
        path = [self.checkpoints.newest_whole(self.reporter.event) if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(path, src=0, device=self.device)
        if path[0] is None:
            return {}
        state, self.progress = self.checkpoints.load(path[0])
        return state
