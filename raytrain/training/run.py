"""A run as a training loop sees it: its batches, and the few operations that make N workers compute what one would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch, Prefetch
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError
from raytrain.runs.outcome import Outcome, Progress
from raytrain.training import transfer
from raytrain.training.augment import Augment
from raytrain.training.autocast import LossScaler, full_precision
from raytrain.training.batch import Batch, HostTensors, mix_batch, on_host, to_batch
from raytrain.training.checkpoint_state import CheckpointState, Stateful
from raytrain.training.evaluation import Network, check_network, with_views
from raytrain.training.gallery import Gallery
from raytrain.training.optimisation import (
    LearningRates,
    Loss,
    build_optimizer,
    check_answers,
    check_closure,
    check_logits,
    check_step,
    parameters_of,
)
from raytrain.training.prepared_models import PreparedModels, WeightAverage, shapes_of
from raytrain.training.protocols import BatchSource, Reporter, Worker
from raytrain.training.random_numbers import seed_generators
from raytrain.training.steps import Steps

WAIT_FOR_DATA = "wait for data"  # the name of this phase in a trace of torch.profiler
_NUM_TRIED = 2  # images; fewer than two are no batch to some networks
T = TypeVar("T", bound=Stateful)


@dataclass(kw_only=True)
class Run:
    """One worker's part of a training run, put together by :func:`raytrain.training.assembly.make_run`."""

    config: ResolvedConfig
    classes: tuple[str, ...]
    plan: BatchPlan
    source: BatchSource
    reporter: Reporter
    worker: Worker
    weights: Mapping[str, Tensor] | None  # initial weights; None if the seed or a checkpoint decides them
    label_sets: Tensor | None  # (K, C), bool: the classes of each label; None if a label is a class
    augment: Augment
    loss: Loss
    models: PreparedModels  # what the loop trains
    state: CheckpointState  # all that the loop has prepared
    steps: Steps
    gallery: Gallery
    evaluation: Callable[[Run, Network], dict[str, float]]  # of the first prepared network, by default

    def __post_init__(self) -> None:
        self.thresholds = self.progress.thresholds
        self.evaluating = False
        self._evaluate = self._built_in_evaluation
        self._part: Batch | None = None
        self._is_last_part = True
        self.rates = LearningRates(self.config, self.plan)
        self._scaler = LossScaler(self.config.precision, self.device)
        self.state.add("scaler", self._scaler)
        seed_generators(mix(self.config.seed), self.device)  # a loop's own networks start the same on every worker

    @property
    def device(self) -> torch.device:
        """The device that this worker computes on."""
        return self.worker.device

    @property
    def rank(self) -> int:
        """This worker's number, counted from 0."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.worker.world_size

    @property
    def num_classes(self) -> int:
        """Number of classes, the width of a classifier's output."""
        return len(self.classes)

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.steps.progress

    def build_model(self) -> nn.Module:
        """The network that the options name, with its initial weights and its frozen layers."""
        model = transfer.initial_model(self.config, self.num_classes, self.weights).train()
        transfer.freeze(model, self.config.freeze, self.num_classes)
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer that the options name, over the parameters of ``model``."""
        return build_optimizer(self.config, model, self.num_classes)

    def prepare(self, thing: T) -> T:
        """Put ``thing`` into every checkpoint, and restore it if the run resumes. Returns what the loop should use.

        A network is moved to the device, and its batch norm and gradients are joined over the workers: train what is
        returned. Anything else has ``state_dict`` and ``load_state_dict``, such as an optimizer of what was returned.
        A loop prepares the same things in the same order each time, and on every worker.
        """
        if isinstance(thing, nn.Module):
            self.steps.check_all("prepares", shapes_of(thing))
            return self.models.add(thing)  # pyright: ignore[reportReturnType]
        kind = "optimizer" if isinstance(thing, Optimizer) else "state"
        if isinstance(thing, WeightAverage) and self.models.trained[:1] == [thing.source]:
            kind = "average"
        name = self.state.add(kind, thing)
        if isinstance(thing, WeightAverage):
            self.models.named[name] = thing.model
        self.rates.prepared(thing)
        return thing

    def batches(self, evaluate: Callable[[], dict[str, float]] | None = None) -> Iterator[Batch]:
        """This worker's batches, from the run's current step on; they end on every worker after the same step.

        Between two batches the run is evaluated, checkpoints are written, and stop requests are read.

        Args:
            evaluate: measures the run in place of the built-in evaluation (``raytrain/training/evaluation.py``), on
                every worker. It returns numbers by name; ``accuracy`` and ``loss`` are used for the run's summary.
        """
        self._evaluate = evaluate or self._evaluate
        self.state.check_complete()
        self._scaler.adapt()
        if self.steps.are_over(self._evaluate_when_due):
            return
        read = self.source.train(self.progress.step)
        ready = partial(on_host, augment=self.augment, device=self.device)
        local_batches = Prefetch(((local, ready(local)) for local in read), self.config.prefetch)
        try:
            for _ in range(self.progress.step, self.plan.num_steps):
                batch = self._begin_step(local_batches)
                with self.models.computing():
                    yield batch
                self._scaler.adapt()
                if self.steps.end(self._evaluate_when_due):
                    break
        finally:
            local_batches.close()
        self.steps.exhausted = True

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The parts of ``batch`` that ``--accumulate`` asks for: backpropagate each, then step once.

        The gradients are the whole global batch's. Batch norm treats each part as a batch, on any number of workers.
        """
        last = len(batch.part_sizes)
        for number, self._part in enumerate(batch.parts(), start=1):
            self._is_last_part = number == last
            if last > 1:  # otherwise it has begun with its step
                self.models.begin_part(self._part, is_last=self._is_last_part)
            yield self._part
            if number < last:
                self.models.end_part()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate ``loss``, a sum over this worker's images, as part of the mean over the global batch.

        With m_j used images on worker j and M of them in all, the gradient becomes Σ_j Σ_i ∂ℓ_ij / M: the loss is
        scaled by N / M, because gradients are averaged over the N workers. Raises UsageError if the loss is no such
        sum.
        """
        part = self._current_part("backward")
        self.steps.backward(loss, part.num_used)
        self._scaler.adapt()
        weight = self.world_size / self.steps.metrics.num_used().clamp(min=1) * (part.num_used > 0)
        self._scaler.multiply(self.models.parameters)
        self.models.backward(self._scaler.scale(loss * weight.to(loss.dtype)))
        self._scaler.divide(self.models.parameters)

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Tensor] | None = None,
        *,
        learning_rate: float | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Step the optimizer and clear its gradients.

        Args:
            optimizer: a prepared optimizer.
            closure: for an optimizer that computes the loss several times a step, such as LBFGS: computes it, calls
                :meth:`backward` with it, and returns it. The gradients are cleared before each call. The optimizer
                gets the mean over the global batch.
            learning_rate: of this step; by default that of the optimizer's groups, times the factor of ``--schedule``.
            clip_norm: scale the gradients down to this Euclidean norm over all parameters, if theirs is larger; by
                default ``--clip-norm``.

        Raises UsageError if one of them cannot be used.
        """
        check_step(optimizer, closure, learning_rate, clip_norm, is_last_part=self._is_last_part)
        clip_norm = clip_norm or self.config.clip_norm
        check_closure(optimizer, self.config, is_given=closure is not None)
        self.models.check_trained_by(optimizer)
        with full_precision(self.device), self.rates.of_step(optimizer, self.progress.step, learning_rate) as rates:
            if closure is not None:
                optimizer.step(partial(self._computed_again, optimizer, closure, clip_norm))  # pyright: ignore
                self.steps.optimizer_steps()
            else:
                self.steps.optimizer_steps()
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(parameters_of(optimizer), clip_norm)
                self._scaler.multiply(partial(parameters_of, optimizer))
                self._scaler.step(optimizer)
        self.steps.learning_rates += rates
        self._scaler.is_used = True
        optimizer.zero_grad()
        self.models.end_part()

    def log(self, **sums: Tensor | float) -> None:
        """Log sums over this worker's images; their means over all workers' images go into the metrics history.

        A row has the mean over the steps in which a name was logged.

        ``correct``, the number of right answers, becomes ``accuracy``; other names stay. Every worker logs the same
        names. Raises UsageError for what is no number, or is seen to be a mean.
        """
        self.steps.log(sums, self._current_part("log").num_used)

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        """How many images of a batch, or a part of one, have right answers, (); ``logits`` are (m, C).

        If an image may have several classes, it counts by the fraction of the classes for which the answer is right.
        """
        check_answers(logits, batch.labels, self.num_classes)
        if self.label_sets is None:
            return (logits.argmax(dim=1) == batch.labels).sum()
        return ((logits > 0) == self.label_sets[batch.labels]).to(logits.dtype).mean(dim=1).sum()

    def show(self, batch: Batch, logits: Tensor) -> None:
        """Show what the network says to whoever watches the run: ``logits``, (m, C), of a batch or a part of one.

        Called in an evaluation, it gives the confusions and the most wrong images; in a loop, the latest batch.
        It waits for nothing, and shows nothing if an image may have several classes. Raises UsageError if the logits
        have another shape.
        """
        check_logits("run.show", logits, batch.labels, self.num_classes)
        if self.label_sets is None:
            (self.gallery.add if self.evaluating else self.gallery.remember)(batch, logits)

    def test_batches(self) -> Iterator[Batch]:
        """This worker's slice of the test images, resized and normalised. Each image is on one worker."""
        for local in self.source.test():
            if len(local.labels):
                yield to_batch(local, self.augment, self.device, training=False, label_sets=self.label_sets)

    def total(self, sums: Tensor | Sequence[float]) -> list[float]:
        """``sums``, numbers (n,), added up over the workers, each of which calls this."""
        given = torch.as_tensor(sums, dtype=sums.dtype if isinstance(sums, Tensor) else torch.float64).detach()
        self.steps.check_all("totals", tuple(given.shape))
        added = given.to(self.device, torch.int64 if given.dtype == torch.bool else given.dtype, copy=True)
        if self.world_size > 1:
            dist.all_reduce(added)
        return added.tolist()

    def gather(self, rows: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The ``rows``, (n, d), of all workers, in their order. Each worker calls this, and has its own n.

        They keep their type, but bfloat16, which NumPy lacks, becomes float32.
        """
        given = torch.as_tensor(rows).detach()
        self.steps.check_all("gathers", tuple(given.shape[1:]))
        own = (given.float() if given.dtype == torch.bfloat16 else given).cpu().numpy()
        gathered: list[Any] = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(gathered, gathered[0])
        return np.concatenate(gathered)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure the run on the test images, at any time, on every worker; the numbers go into the metrics history."""
        self.steps.report_start()  # otherwise nobody would read the test images
        self.steps.check_all("evaluations")
        started = time.perf_counter()
        self.evaluating = True
        with self.models.evaluating():
            measured = self._evaluate()
        self.evaluating = False
        self.gallery.write(self.steps.evaluated(measured, self.thresholds), self.rank, self.world_size)
        self.steps.metrics.exclude(time.perf_counter() - started)
        return measured

    def finish(self) -> Outcome:
        """The loop has returned: record the last metrics, write a checkpoint. UsageError if only some loops have."""
        self._scaler.adapt()
        outcome = self.steps.finish(self._evaluate_when_due)
        self.gallery.close()
        return outcome

    def check_evaluation(self) -> None:
        """Raise UsageError if the built-in evaluation is due some time, and cannot measure what the loop prepares."""
        if self._evaluate == self._built_in_evaluation and not self.config.is_range_test and self._part is not None:
            check_network(self, self.models.evaluated, self._part.images[:_NUM_TRIED])

    def _current_part(self, call: str) -> Batch:
        """The part of the batch that the loop computes; UsageError before it has got a batch."""
        if self._part is None:
            raise UsageError(
                f"The loop calls run.{call} before it has a batch; call it in `for batch in run.batches():`."
            )
        return self._part

    def _computed_again(self, optimizer: Optimizer, closure: Callable[[], Tensor], clip_norm: float | None) -> Tensor:
        """The mean loss over the global batch, the same on all workers, which decide by it; with its gradients."""
        part = self._current_part("step")
        optimizer.zero_grad()
        with self.models.computing():
            loss = closure()
        if not isinstance(loss, Tensor):
            raise UsageError("The closure of run.step returns no loss; return what it gives to run.backward.")
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), clip_norm)
        total = loss.detach().double() * (part.num_used > 0)
        if self.world_size > 1:
            dist.all_reduce(total)
        return (total / self.steps.metrics.num_used().clamp(min=1)).to(loss.dtype)

    def _evaluate_when_due(self) -> None:
        if self._evaluate != self._built_in_evaluation:
            self.steps.before_own_evaluation()
        self.evaluate()

    def _built_in_evaluation(self) -> dict[str, float]:
        return self.evaluation(self, with_views(self.models.evaluated, self.config.test_views))

    def _begin_step(self, local_batches: Iterator[tuple[LocalBatch, HostTensors]]) -> Batch:
        started = time.perf_counter()
        with record_function(WAIT_FOR_DATA):
            local, tensors = next(local_batches)
        self.steps.begin(local, time.perf_counter() - started)
        seed_generators(mix(self.config.seed, local.batch.step, self.rank), self.device)  # the same after a resume
        mixup, cutmix, sets = self.config.mixup, self.config.cutmix, self.label_sets
        batch = to_batch(local, self.augment, self.device, training=True, label_sets=sets, tensors=tensors)
        if mixup or cutmix:
            batch = mix_batch(batch, self.num_classes, self.config.seed, mixup=mixup, cutmix=cutmix, label_sets=sets)
        self._part, self._is_last_part = batch, True
        self.models.begin_part(batch, is_last=True)
        return batch
