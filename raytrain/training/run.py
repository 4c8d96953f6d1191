"""What a training loop is given: its batches, and the few operations that make N workers compute what one would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from raytrain.config import ResolvedConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.local_batch import LocalBatch
from raytrain.data.permutation import mix
from raytrain.data.prefetch import Prefetch
from raytrain.errors import UsageError
from raytrain.monitor.events import CheckpointSkipped, Note
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Outcome, Progress
from raytrain.runs.snapshot import epoch_of
from raytrain.training import lr_schedule, transfer
from raytrain.training.augment import Augment
from raytrain.training.batch import Batch, to_batch
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.checkpoint_schedule import CheckpointSchedule
from raytrain.training.early_stop import EarlyStop
from raytrain.training.flip_test import Network
from raytrain.training.gallery import Gallery
from raytrain.training.loop_validator import LoopValidator, check_loops_returned
from raytrain.training.loss import Loss
from raytrain.training.machine_meter import MachineMeter
from raytrain.training.malloc import keep_freed_memory
from raytrain.training.mixing import mix_batch
from raytrain.training.optimizer import build_optimizer, clip_gradients, set_learning_rate
from raytrain.training.precision import precision_warning, set_gpu_products
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import BatchSource, Reporter
from raytrain.training.sample_trace import SampleTrace
from raytrain.training.shift_test import with_views
from raytrain.training.state import CheckpointState, Stateful
from raytrain.training.step_metrics import StepMetrics
from raytrain.training.step_reduce import StepContribution, StepReduce, StepTotals
from raytrain.training.transforms import Transforms, build_transforms

WAIT_FOR_DATA = "wait for data"
"""The name of this phase in a trace of torch.profiler."""
T = TypeVar("T", bound=Stateful)


@dataclass
class Run:
    """One worker's part of a training run, put together by :meth:`raytrain.training.run_spec.RunSpec.make_run`."""

    config: ResolvedConfig
    classes: tuple[str, ...]
    plan: BatchPlan
    source: BatchSource
    reporter: Reporter
    checkpoints: Checkpoints
    evaluation: Callable[[Run, Network], dict[str, float]]  # of the first prepared network, by default
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    weights: Mapping[str, Tensor] | None = None  # initial weights; None if the seed or a checkpoint decides them
    transforms: Callable[[], Transforms] | None = None  # makes the user's own
    class_weights: tuple[float, ...] | None = None  # in the loss; None if all are equal
    label_sets: Tensor | None = None  # (K, C), bool: the classes of each label; None if a label is a class
    progress: Progress = field(default_factory=Progress, init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.augment = Augment(self.config, build_transforms(self.config, self.transforms))
        self.loss = Loss(self.config, self.class_weights, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            set_gpu_products(self.config.precision)
            torch.backends.cudnn.benchmark = True  # worth its trials: nearly all batches have one size
        if self.rank == 0 and (warning := precision_warning(self.config.precision, self.device)):
            self.reporter.event(Note(warning))  # before the first step, which may take minutes then
        checkpoint = self.checkpoints.load_newest(self.reporter.event, self.device)
        self.progress = checkpoint.progress if checkpoint else Progress()
        step = self.progress.step
        self._state = CheckpointState(checkpoint.state if checkpoint else {})
        self._models = PreparedModels(self.config, self.device, self.world_size, self._state)
        self._schedule = CheckpointSchedule(self.config, self.plan.steps_per_epoch, step if checkpoint else None)
        self._trace = SampleTrace(self.checkpoints.store, self.rank, step) if self.config.trace else None
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.precision == "float16")  # pyright: ignore
        self._state.add("scaler", self._scaler)
        self._record = self.reporter.record if self.rank == 0 else lambda row: None
        self._reduce = StepReduce(self.device, self.world_size)
        self._metrics = StepMetrics(self._reduce, self._record, self.world_size, self.progress.samples_seen)
        self._machine = MachineMeter(self.rank, self.device, self.reporter.measured)
        self._validator = LoopValidator()
        self._early_stop = EarlyStop(self.config)
        self._gallery = Gallery(self.config, self.classes, self.checkpoints.store, self.reporter.event)
        self.thresholds = self.progress.thresholds
        self.evaluating = False
        self._part: Batch | None = None
        self._learning_rate = 0.0
        self._exhausted = False  # the loop has got all batches that it gets
        self._start_reported = False
        torch.manual_seed(mix(self.config.seed) >> 1)  # a loop's own networks start the same on every worker
        self._evaluate = self._built_in_evaluation

    # What a loop calls.

    @property
    def num_classes(self) -> int:
        """Number of classes, the width of a classifier's output."""
        return len(self.classes)

    def build_model(self) -> nn.Module:
        """The network that the options name, with its initial weights and its frozen layers."""
        model = transfer.initial_model(self.config, self.num_classes, self.weights)
        transfer.freeze(model, self.config.freeze, self.num_classes)
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer that the options name, over the parameters of ``model``."""
        return build_optimizer(self.config, model, self.num_classes)

    def prepare(self, thing: T) -> T:
        """Put ``thing`` into every checkpoint, and restore it if the run resumes. Returns what the loop should use.

        A network is moved to the device, and its batch norm and gradients are joined over the workers: train what is
        returned. Make an optimizer from what was returned. Anything else has ``state_dict`` and ``load_state_dict``,
        such as an average of the weights. A loop prepares the same things in the same order each time.
        """
        if isinstance(thing, nn.Module):
            return self._models.add(thing)  # pyright: ignore[reportReturnType]
        self._state.add("optimizer" if isinstance(thing, Optimizer) else "state", thing)
        return thing

    def batches(self, evaluate: Callable[[], dict[str, float]] | None = None) -> Iterator[Batch]:
        """This worker's batches, from the run's current step on; they end on every worker after the same step.

        Between two batches the run is evaluated, checkpoints are written, and stop requests are read.

        Args:
            evaluate: measures the run in place of the built-in evaluation (``raytrain/training/evaluation.py``), on
                every worker. It returns numbers by name; ``accuracy`` and ``loss`` are used for the run's summary.
        """
        self._evaluate = evaluate or self._evaluate
        self._state.check_complete()
        self._models.train()
        if self._evaluation_is_due() and self.progress.evaluated_step != self.progress.step:
            self.evaluate()  # the run was stopped before it
        first_step = self.progress.step
        local_batches = Prefetch(self.source.train(first_step), self.config.prefetch)
        try:
            for step in range(first_step, self.plan.num_steps):
                yield self._begin_step(step, local_batches)
                self._report_start()  # not earlier: the driver then reads ahead, which would slow down the first step
                if self._end_step():
                    break
        finally:
            local_batches.close()
        self._exhausted = True

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The parts of ``batch`` that ``--accumulate`` asks for: backpropagate each, then step once.

        The gradients are the whole global batch's. Batch norm treats each part as a batch, the same on any number of
        workers.
        """
        for number, self._part in enumerate(batch.parts(), start=1):
            is_last = number == len(batch.part_sizes)
            self._models.begin_part(self._part, is_last=is_last)
            yield self._part
            if not is_last:
                self._models.end_part()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate ``loss``, a sum over this worker's images, as part of the mean over the global batch.

        With m_j used images on worker j and M of them in all, the gradient becomes Σ_j Σ_i ∂ℓ_ij / M: the loss is
        scaled by N / M, because DistributedDataParallel averages over the N workers. Raises UsageError if the loss is
        no such sum.
        """
        assert self._part is not None
        self._validator.backward(loss)
        weight = self.world_size / self._reduce.num_used().clamp(min=1) * (self._part.num_used > 0)
        self._models.backward(self._scaler.scale(loss * weight.to(loss.dtype)))

    def step(self, optimizer: Optimizer, *, learning_rate: float | None = None, clip_norm: float | None = None) -> None:
        """Step the optimizer and clear its gradients.

        Args:
            optimizer: a prepared optimizer.
            learning_rate: of this step; by default that of the optimizer when it was prepared, times the factor of
                ``--schedule``.
            clip_norm: scale the gradients down to this Euclidean norm over all parameters, if theirs is larger; by
                default ``--clip-norm``.
        """
        self._validator.step()
        factor = lr_schedule.factor(self.config, self.progress.step, self.plan.steps_per_epoch, self.plan.num_steps)
        self._learning_rate = set_learning_rate(optimizer, learning_rate, factor)
        clip_norm = clip_norm or self.config.clip_norm
        if clip_norm is not None:
            self._scaler.unscale_(optimizer)
            clip_gradients(optimizer, clip_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad()

    def log(self, **sums: Tensor) -> None:
        """Log sums over this worker's images; their means over all workers' images go into the metrics history.

        ``correct``, the number of right answers, becomes ``accuracy``; other names stay. Every worker logs the same
        names.
        """
        assert self._part is not None
        self._reduce.log(sums, counts=self._part.num_used > 0)

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        """How many images of a batch, or a part of one, have right answers, (); ``logits`` are (m, C).

        If an image may have several classes, it counts by the fraction of the classes for which the answer is right.
        """
        if self.label_sets is None:
            return (logits.argmax(dim=1) == batch.labels).sum()
        return ((logits > 0) == self.label_sets[batch.labels]).to(logits.dtype).mean(dim=1).sum()

    def show(self, batch: Batch, logits: Tensor) -> None:
        """Show what the network says to whoever watches the run: ``logits``, (m, C), of a batch or a part of one.

        Called in an evaluation, it gives the confusions and the most wrong images; in a loop, the latest batch.
        It waits for nothing, and shows nothing if an image may have several classes. Raises UsageError if the logits
        have another shape.
        """
        if logits.shape != (len(batch.labels), self.num_classes):
            raise UsageError(
                f"run.show got logits of the shape {tuple(logits.shape)} for {len(batch.labels)} images and "
                f"{self.num_classes} classes; give one row per image, with one number per class."
            )
        if self.label_sets is None:
            (self._gallery.add if self.evaluating else self._gallery.remember)(batch, logits)

    def test_batches(self) -> Iterator[Batch]:
        """This worker's slice of the test images, resized and normalised. Each image is on one worker."""
        for local in self.source.test():
            if len(local.labels):
                yield to_batch(local, self.augment, self.device, training=False, label_sets=self.label_sets)

    def total(self, sums: Tensor) -> list[float]:
        """``sums``, of shape (n,), added up over the workers, each of which calls this. Changes ``sums``."""
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    def gather(self, rows: Tensor) -> npt.NDArray[np.float64]:
        """The ``rows``, float64 (n, d), of all workers, in their order. Each worker calls this, and has its own n."""
        gathered: list[Any] = [rows.cpu().numpy()] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(gathered, gathered[0])
        return np.concatenate(gathered)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure the run on the test images, at any time, on every worker; the numbers go into the metrics history."""
        self._report_start()  # otherwise nobody would read the test images
        started = time.perf_counter()
        self._models.eval()
        self.evaluating = True
        measured = self._evaluate()
        self.evaluating = False
        self._models.train()
        step = self.progress.step + self._validator.stepped  # the current step counts once its optimizer has stepped
        accuracy, loss = measured.get("accuracy"), measured.get("loss")
        progress = replace(self.progress, test_accuracy=accuracy, test_loss=loss, evaluated_step=step)
        progress = replace(progress, thresholds=self.thresholds)
        self.progress = self._early_stop.evaluated(progress, measured)
        epoch = epoch_of(step, self.plan.steps_per_epoch)
        self._record(MetricRow(kind="evaluation", step=step, epoch=epoch, metrics=measured))
        self._gallery.write(step, self.rank, self.world_size)
        self._metrics.exclude(time.perf_counter() - started)
        return measured

    def finish(self) -> Outcome:
        """Called by whoever called the loop, when it has returned: records the last metrics and writes a checkpoint.

        Raises UsageError if the loop returned on some workers only, before the end of the run.
        """
        if not self._exhausted and self._validator.stepped:
            self._complete_step()  # the loop returned after this step
        totals = self._metrics.flush(StepContribution(loop_returned=not self._exhausted))
        check_loops_returned(totals.loops_returned, self.world_size, self.progress.step)
        if self._models.wrapped and self._schedule.due_at_end(self.progress.step):
            self._save()
        self.checkpoints.close()
        self._gallery.close()
        checkpoint = self._schedule.newest_path
        if error := self._schedule.divergence:
            return Outcome(status="failed", progress=self.progress, checkpoint=checkpoint, error=error)
        status = "stopped" if self.progress.step < self.plan.num_steps else "finished"
        reason = self._early_stop.reason
        return Outcome(status=status, progress=self.progress, checkpoint=checkpoint, stop_reason=reason)

    # What happens between two batches.

    def _built_in_evaluation(self) -> dict[str, float]:
        config = self.config
        network = with_views(self._models.evaluated, config.test_views)
        return self.evaluation(self, network)

    def _begin_step(self, step: int, local_batches: Iterator[LocalBatch]) -> Batch:
        started = time.perf_counter()
        with record_function(WAIT_FOR_DATA):
            self._local = next(local_batches)
        wait_s = time.perf_counter() - started
        self._machine.step(len(self._local.labels), wait_s)
        stop = self.reporter.stop_requested() or (self.rank == 0 and self._early_stop.time_is_up())
        checkpoint = self._checkpoint_requested()
        self._reduce.start(StepContribution(len(self._local.labels), wait_s, stop, checkpoint))
        batch = to_batch(self._local, self.augment, self.device, training=True, label_sets=self.label_sets)
        config = self.config
        if config.mixup or config.cutmix:
            batch = mix_batch(
                batch,
                self.num_classes,
                config.seed,
                mixup=config.mixup,
                cutmix=config.cutmix,
                label_sets=self.label_sets,
            )
        self._part = batch
        self._models.begin_part(self._part, is_last=True)
        self._validator.begin()
        torch.manual_seed(mix(self.config.seed, step, self.rank) >> 1)  # what else is random repeats after a resume
        return self._part

    def _end_step(self) -> bool:
        """Record the step, evaluate and write a checkpoint if they are due. Whether the run stops after this step."""
        self._validator.complete()
        totals = self._complete_step()
        check_loops_returned(totals.loops_returned, self.world_size, self.progress.step)
        ends_run = self.progress.step == self.plan.num_steps
        if totals.stop_requests and not ends_run:
            return True
        if ends_run or self._evaluation_is_due():
            self.evaluate()
        if totals.checkpoint_requests or self._schedule.due_at(self.progress.step):
            self._metrics.flush(StepContribution())  # a run that resumes from here never records this step again
            self._save()
        return self._early_stop.reason is not None

    def _complete_step(self) -> StepTotals:
        self._models.end_part()
        self._models.update_averages(self._local.batch.step)
        self._validator.begin()
        totals = self._metrics.read()
        step = self._local.batch.step + 1
        if self._trace is not None:
            self._trace.add(step, self._local.samples)
        self.progress = replace(self.progress, step=step, samples_seen=self._metrics.samples_seen)
        if step % self.config.log_every == 0 or step == self.plan.num_steps:
            self._metrics.close_row(self._local.batch, self._learning_rate)
        return totals

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluate_every * self.plan.steps_per_epoch
        return every > 0 and self.progress.step > 0 and self.progress.step % every == 0

    def _checkpoint_requested(self) -> bool:
        return self.rank == 0 and (self.reporter.checkpoint_requested() or self._schedule.due_by_time())

    def _save(self) -> None:
        is_finite = self._models.are_finite()  # the same on every worker
        self._schedule.attempted(self.progress.step, is_finite=is_finite)
        if self._trace is not None:
            self._trace.write()
            if self.world_size > 1:
                dist.barrier()  # every worker's trace must be there before the checkpoint
        if self.rank == 0 and is_finite:
            self.checkpoints.save(self._state.state_dict(), self.progress, before=self.reporter.flush)
        elif self.rank == 0:
            self.reporter.event(CheckpointSkipped(self.progress.step))

    def _report_start(self) -> None:
        if self.rank == 0 and not self._start_reported:
            self.reporter.started(self.world_size, self.progress.step)
        self._start_reported = True
