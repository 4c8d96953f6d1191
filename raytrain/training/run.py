"""A run as a training loop sees it: epochs of batches, and the few calls that make N workers compute what one would.

Each worker calls the same loop with a :class:`Run` of its own, and the loop computes as on one GPU. For each batch that
it asks for,

1. ``_batches`` takes a local batch that was read ahead, starts the step's all-reduce (``Steps.begin``), seeds the
   random number generators, and augments and mixes the images on the device;
2. the loop's own code runs with the batch, in the precision of the run; ``_begin_microbatch`` has told the gradients,
   batch norm and dropout, and ``log``, ``mean``, ``gather`` and ``total``, which images the loop computes;
3. when the loop asks for the next batch, ``Steps.end_batch`` reads the totals of all workers, and writes the
   checkpoints that are due.

:mod:`raytrain.training.steps` decides when an evaluation or a checkpoint is due. Evaluations are made here, because a
loop may call one, too.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from raytrain.config import ResolvedConfig
from raytrain.config.user_code import lacks_memory
from raytrain.data.blocks import LocalBatch
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError, format_count
from raytrain.runs.metric_row import NUM_SUSPICIOUS_SHOWN
from raytrain.runs.outcome import Outcome, Progress, TrainResult
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import Batch, Epoch
from raytrain.training.batches.device_batches import DeviceBatches, HostTensors
from raytrain.training.checkpoint_state import CheckpointState, Stateful
from raytrain.training.exact.gather import gather_rows
from raytrain.training.metrics.gallery import Gallery
from raytrain.training.metrics.prepared_metrics import is_metric
from raytrain.training.metrics.sample_margins import SampleMargins
from raytrain.training.metrics.step_metrics import logged_fractions
from raytrain.training.networks import transfer
from raytrain.training.networks.loss import Loss, check_answers, check_logits
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.optimisation import build_optimizer, build_scheduler
from raytrain.training.prepared_models import PreparedModels, shapes_of
from raytrain.training.protocols import Reporter, Worker
from raytrain.training.random_numbers import seed_generators
from raytrain.training.run_files import RunFiles
from raytrain.training.steps import Steps

WAIT_FOR_DATA = "wait for data"  # the name of this phase in a trace of torch.profiler
T = TypeVar("T", bound=Stateful)
_NOTHING_LEARNT = (
    "after {} the weights are what they were before: compute with each batch before asking for the next one, call "
    "loss.backward(), and step an optimizer of the weights of the network that run.prepare has returned, with a "
    "learning rate above 0; do not skip batches of fewer images than --batch-size, of which each worker gets a part"
)
_TEST_NOT_READ = (
    "the test images are not measured: the loop's evaluation does not read run.evaluation_batches(); raytrain evaluate "
    "measures them"
)


@dataclass(kw_only=True)
class Run:
    """One worker's part of a training run, put together by :func:`raytrain.training.assembly.make_run`.

    Example::

        def train(run: raytrain.Run) -> None:
            model = run.prepare(run.build_model())
            optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
            for epoch in run.epochs():
                for batch in epoch:
                    loss = cross_entropy(model(batch.images), batch.labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.log(loss=loss)
    """

    config: ResolvedConfig
    classes: tuple[str, ...]
    plan: BatchPlan
    reporter: Reporter
    worker: Worker
    weights: Mapping[str, Tensor] | None  # initial weights; None if the seed or a checkpoint decides them
    label_sets: Tensor | None  # (K, C), bool: the classes of each label; None if a label is a class
    augment: Augment
    batches: DeviceBatches
    loss: Loss
    models: PreparedModels  # what the loop trains
    state: CheckpointState  # all that the loop has prepared
    steps: Steps
    gallery: Gallery
    files: RunFiles
    margins: SampleMargins
    evaluation: Callable[[Run], dict[str, float]]  # the built-in one, of the first prepared network
    has_test: bool = False  # there are test images, beside those for validation

    def __post_init__(self) -> None:
        self.thresholds = self.progress.thresholds  # of the last evaluation, if an image may have several classes
        self.evaluating = False  # True within an evaluation, and after one that ran out of memory
        self.own_evaluation: Callable[[], dict[str, float]] | None = None  # that the loop gave to run.epochs
        self.microbatch: Batch | None = None  # what the loop computes: its batch, or a microbatch of it
        self.result: TrainResult | None = None
        """How the run ended, on every worker, once the block of :func:`raytrain.attach` is left."""
        self._open_epochs: Generator[Epoch, None, None] | None = None  # over which the loop goes
        self._open_batches: Generator[Batch, None, None] | None = None  # of the current epoch
        self._measured_part: Part = "validation"
        self._has_asked_for_images = False  # True once an evaluation has called evaluation_batches
        self._held_parameters: list[nn.Parameter] = []  # not trained while the head learns alone
        seed_generators(mix(self.config.seed), self.device)  # a loop's own networks start the same on every worker

    @property
    def device(self) -> torch.device:
        """Device that this worker computes on."""
        return self.worker.device

    @property
    def rank(self) -> int:
        """Number of this worker, counted from 0."""
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
        """How far the run has come."""
        return self.steps.progress

    @property
    def folder(self) -> Path:
        """Folder for files that the loop writes, such as pictures; it has them again after a resume.

        What worker 0 writes there is kept in ``files/`` of the run's storage. If that is a bucket, it is sent there
        every half minute and at the end of the run, also of one that fails. What other workers write is dropped.

        Example::

            torch.save(model.state_dict(), run.folder / f"epoch-{epoch.number}.pt")
        """
        return self.files.folder

    def build_model(self) -> nn.Module:
        """Return the network that the options name, with its initial weights, in training mode.

        The layers that ``--freeze`` names get no gradients. Give the network to :meth:`prepare`.
        """
        model = transfer.initial_model(self.config, self.num_classes, self.weights).train()
        transfer.freeze(model, self.config.freeze, self.num_classes)
        # A network that is prepared later is taken for the one of the options if its layers have the same text.
        self.models.built_by_options.add(str(model))
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer that the options name, over the trainable parameters of ``model``.

        Raises UsageError if nothing is left to train, or if an option needs the head or the order of the layers and
        these cannot be found in the network.
        """
        return build_optimizer(self.config, model, self.num_classes)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the scheduler of ``--schedule`` and ``--warmup-epochs``; call its ``step()`` after each batch."""
        return build_scheduler(self.config, self.plan, optimizer)

    def train_head_first(self, model: nn.Module, epoch: Epoch) -> None:
        """Have the head of ``model`` learn alone in the first ``--head-epochs`` epochs; call it at the start of each.

        In these epochs, the other layers get no gradients, and their batch norm normalises with its running statistics,
        because the gradients of an untrained head would spoil pretrained layers. A step takes a third of the time. The
        first call after these epochs releases the other layers, and puts the network into training mode.

        Example::

            for epoch in run.epochs():
                run.train_head_first(model, epoch)
        """
        if epoch.number < self.config.head_epochs:
            self._held_parameters += transfer.hold_body(model, self.num_classes)
        elif self._held_parameters:
            transfer.release(model, self._held_parameters)
            self._held_parameters = []

    def prepare(self, thing: T) -> T:
        """Put ``thing`` into every checkpoint, restore it if the run resumes, and return what the loop should use.

        A network is moved to the device, and its batch norm, dropout and gradients become those of all workers: train
        what is returned. Anything else has ``state_dict`` and ``load_state_dict``, such as an optimizer of what was
        returned; an object of ``torchmetrics`` then measures the images of all workers. A loop prepares the same things
        in the same order each time, and on every worker.

        Raises UsageError for a thing without a state, after the first epoch has begun, if the checkpoint does not fit,
        or if workers prepare networks of different shapes.

        Example::

            model = run.prepare(run.build_model())
            optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
        """
        if isinstance(thing, nn.Module) and is_metric(thing):
            self.state.add_metric(thing.to(self.device), lambda: self._is_placeholder)
            return thing
        if isinstance(thing, nn.Module):
            self.steps.check_all("prepares", shapes_of(thing))
            return self.models.add(thing)  # pyright: ignore[reportReturnType]
        if isinstance(thing, WeightAverage):
            self.models.add_average(thing)
        else:
            self.state.add("optimizer" if isinstance(thing, Optimizer) else "state", thing)
        return thing

    def epochs(self, evaluate: Callable[[], dict[str, float]] | None = None) -> Iterator[Epoch]:
        """Yield the epochs of the run, each an iterable of this worker's batches, from the run's current step on.

        They end on every worker after the same step: after the last epoch, or after a stop request. Between two batches
        checkpoints are written; between two epochs the run is evaluated. A batch that an earlier call left open is
        ended first.

        Example::

            for epoch in run.epochs():
                for batch in epoch:
                    loss = cross_entropy(model(batch.images), batch.labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

        Args:
            evaluate: measures the run in place of the built-in evaluation (``raytrain/training/evaluation.py``), on
                every worker. It returns numbers by name; ``accuracy`` and ``loss`` are used for the run's summary.
        """
        self.own_evaluation = evaluate or self.own_evaluation
        self.leave_batch()
        self._open_epochs = self._epochs()
        return self._open_epochs

    def _epochs(self) -> Generator[Epoch, None, None]:
        """Yield the epochs of the run from its current step on; after each, evaluate and save if that is due.

        Raises UsageError if the loop has not prepared everything that the checkpoint holds.
        """
        per_epoch, num_steps = self.plan.steps_per_epoch, self.plan.num_steps
        self.state.check_complete(within_epoch=self.progress.step % per_epoch > 0)
        self.steps.open(self._evaluate_when_due)
        if self.steps.is_over:
            return

        local_batches = self.batches.read_ahead(self.progress.step)
        try:
            while not self.steps.is_over:
                number = self.progress.step // per_epoch
                last_step = min((number + 1) * per_epoch, num_steps)
                self._open_batches = self._batches(local_batches, last_step)
                # The loop, whose frame asks for the epoch, may carry numbers from epoch to epoch, which are noted.
                self.steps.unprepared.begin_epoch(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
                yield Epoch(number, per_epoch, self._open_batches, lambda: self.steps.is_over)

                # The loop asks for the next epoch. If it has left this one within a batch, that batch is still a step,
                # and the batches after it are skipped.
                num_skipped = last_step - self.progress.step - self.steps.in_batch
                if self.steps.in_batch:
                    self.steps.leave_epoch(num_skipped)
                self.steps.end_epoch(self._evaluate_when_due)
                if not self.steps.is_over:  # otherwise nobody takes further batches
                    for _ in range(num_skipped):
                        next(local_batches)
        finally:
            local_batches.close()

    def _batches(
        self, local_batches: Iterator[tuple[LocalBatch, HostTensors]], last_step: int
    ) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch before ``last_step``, counted from 0, augmented and mixed.

        Between two of them, the step is ended, and a checkpoint is written if one is due. After the first epoch of the
        run, a note is reported if no weight has changed.
        """
        first_step = self.progress.step
        self.state.undo_start_of_epoch()
        # A resume may begin with an epoch that trains nothing, such as one for the statistics of batch norm.
        digest_before = None if first_step else self.models.digest_of_weights()
        while not self.steps.is_over and self.progress.step < last_step:
            # Begin the step of the next batch.
            self.files.keep_changes()
            started = time.perf_counter()
            with record_function(WAIT_FOR_DATA):
                local, tensors = next(local_batches)
            self.steps.begin(local, time.perf_counter() - started)
            seed_generators(mix(self.config.seed, local.batch.step, self.rank), self.device)  # the same after a resume
            batch = replace(self.batches.prepare(local, tensors), begin_microbatch=self._begin_microbatch)
            del local, tensors  # frees their memory for the images that are read while the loop computes
            self._begin_microbatch(batch, is_whole=True)
            self.margins.begin(batch)

            # The loop's own code runs with the batch, until it asks for the next one.
            loop_frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            self.steps.unprepared.look(loop_frame, self, is_first_of_epoch=batch.step == first_step)
            with self.models.computing(), self.steps.watch.step(batch, loop_frame, self):
                yield batch
            if self.steps.end_batch():
                break

        # After the first epoch of the run, see that the loop has trained. A digest without rows means that no weight
        # can learn, as in a loop that has prepared no network.
        if (
            digest_before is not None
            and len(digest_before)
            and torch.equal(digest_before, self.models.digest_of_weights())
        ):
            self.steps.report_once(_NOTHING_LEARNT.format(format_count(self.progress.step - first_step, "step")))

    def _begin_microbatch(self, microbatch: Batch, *, is_whole: bool) -> None:
        """Weight losses, gradients and metrics from now on by the images of ``microbatch``.

        With ``is_whole``, it is the whole batch of this worker, which the loop may still divide into microbatches.
        """
        self.microbatch = microbatch
        self.steps.begin_microbatch(microbatch.num_used)
        self.models.begin_microbatch(microbatch, is_whole=is_whole)

    def leave_batch(self) -> None:
        """Close the generators of batches and epochs that a loop has not used up.

        That leaves the contexts around the loop's code of a batch, such as autocast, and ends the reading ahead. One
        that a thread of the loop's own is in cannot be closed, and must not hide the error of a loop that has failed.
        """
        for generator in (self._open_batches, self._open_epochs):
            if generator is not None and inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:
                generator.close()

    def no_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context in which each backward keeps its gradients on this worker; does nothing if not ``enabled``.

        The next backward after the context, or the next step of an optimizer, sums these gradients over the workers. A
        loop that adds up the gradients of several backwards is right without this context, but sends gradients in each
        of them; with it, they are sent once. Gradients that are not summed yet are missing in ``.grad``: call
        ``zero_grad()`` before the first of these backwards, and clip gradients after the last one, outside of the
        context. On one worker, the context changes nothing.

        Example::

            for microbatch in batch.microbatches():
                with run.no_sync(not microbatch.is_last):
                    cross_entropy(model(microbatch.images), microbatch.labels).backward()
        """
        return self.models.gradients.deferred() if enabled else nullcontext()

    def log(self, **values: Any) -> None:
        """Log means over this worker's images; the metrics history gets the means over all workers' images.

        A row of the history has the mean over the steps in which a name was logged. Every worker logs the same names.

        Args:
            values: by name, one of: the mean over this worker's images of the batch, as a number or a tensor with one
                number; ``(numerator, denominator)``, for a quotient that is not a mean over the images; a vector, whose
                numbers become one metric each, named after the classes if there are as many; a dictionary of these
                means; or an object of ``torchmetrics``.

        Raises UsageError for anything else, for names that the history has already, and before the first batch.

        Example::

            run.log(loss=loss, accuracy=(logits.argmax(1) == batch.labels).float().mean(), recall=(hits, positives))
        """
        num_used = self._current_microbatch("log").num_used
        fractions = logged_fractions(values, num_used, self.classes, self.world_size)
        self.steps.metrics.log(fractions, counts=num_used > 0)

    def mean(self, numerator: Tensor, denominator: Tensor | float) -> Tensor:
        """Return a loss: the sum of all workers' numerators over the sum of denominators. Every worker calls this.

        It is for means over something other than images, such as the class-weighted ``cross_entropy``, which divides by
        the weights, or a loss that leaves out pixels or labels. On one worker it is ``numerator / denominator``. On
        several workers, each gets a number of its own, for its ``backward()`` and its ``log``: the mean of these
        numbers, weighted by the workers' images, is the quotient of the sums.

        Raises UsageError if only some workers call it, or before the first batch.

        Example::

            losses = cross_entropy(logits, batch.labels, weights, reduction="sum")
            loss = run.mean(losses, weights[batch.labels].sum())
        """
        num_used = self._current_microbatch("mean").num_used
        self.steps.check_all("means")
        with self.steps.watch.paused():
            # Sum denominators and numbers of images over the workers; the denominator of a placeholder does not count.
            if isinstance(denominator, Tensor):
                divisor = denominator.detach().to(self.device, torch.float64).reshape(())
            else:  # filled in on the device: for a copy from the host, that would wait
                divisor = torch.full((), float(denominator), dtype=torch.float64, device=self.device)
            totals = torch.stack([divisor * (num_used > 0), torch.full_like(divisor, num_used)])
            if self.world_size > 1:
                dist.all_reduce(totals)
            # The numerator may also be a count, such as that of right answers. Sums of 0 would divide by 0.
            dtype = numerator.dtype if numerator.is_floating_point() else torch.float64
            total, num_images = totals.to(dtype).clamp(min=torch.finfo(dtype).tiny)
            # Gradients and logged values of this worker are multiplied by m_j / M: M / m_j makes up for that.
            mean = numerator / total * (num_images / max(num_used, 1))
        self.steps.watch.follow_mean(numerator, mean)
        return mean

    def accuracy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the fraction of right answers in a batch, or a microbatch, (); ``logits`` are (m, C).

        If an image may have several classes, it counts as the fraction of classes for which the answer is right. The
        margins of the images are counted, too, from which the run finds labels that look wrong. Raises UsageError if
        the logits have another shape.

        Example::

            run.log(accuracy=run.accuracy(logits, batch))
        """
        check_answers(logits, batch.labels, self.num_classes)
        self.margins.add(logits, batch.labels)
        if self.label_sets is None:
            return (logits.argmax(dim=1) == batch.labels).to(torch.float64).mean()
        return ((logits > 0) == self.label_sets[batch.labels]).to(logits.dtype).mean()

    def show(self, batch: Batch, logits: Tensor) -> None:
        """Show the network's answers to whoever watches the run: ``logits``, (m, C), of a batch or a microbatch.

        In an evaluation, the confusions and the most wrong images are shown; in a loop, the latest batch. The call does
        not wait for the device, and shows nothing if an image may have several classes. As in :meth:`accuracy`, the
        margins are counted. Raises UsageError if the logits have another shape.

        Example::

            run.show(batch, logits)
        """
        check_logits("run.show", logits, batch.labels, self.num_classes)
        self.margins.add(logits, batch.labels)
        if self.label_sets is not None or self._measured_part == "test":  # nobody looks at test images
            return
        if self.evaluating:
            self.gallery.add(batch, logits)
        else:
            self.gallery.remember(batch, logits)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield this worker's slice of the images to measure, resized and normalised. Each image is on one worker.

        They are the validation images, and in the last evaluation, at the end of the run, the test images if it has
        any.

        Example::

            logits = [model(batch.images) for batch in run.evaluation_batches()]
        """
        self._has_asked_for_images = True
        # Also before the first step, and in it: a driver of Ray reads these images only once the run has started.
        self.steps.report_start()
        for batch in self.batches.held_out(self._measured_part):
            self.models.begin_images()
            yield batch

    def keys(self, batch: Batch) -> list[str]:
        """Return the keys of the images of a batch or a microbatch: key i, such as a path, is that of ``images[i]``.

        They are the keys of the images in the run's data, as ``manifest.parquet`` and the page have them. A mixed image
        has the key of the one whose label is in ``labels``, a placeholder the key "". The host waits for a GPU here.

        Example::

            for key, loss in zip(run.keys(batch), losses.tolist()):
                print(key, loss)
        """
        return self.batches.keys(batch)

    def total(self, sums: Tensor | Sequence[float]) -> list[float]:
        """Return ``sums``, numbers (n,), added up over the workers, each of which calls this.

        In a batch, the sums of a worker without images do not count, because they come from a placeholder. Raises
        UsageError if only some workers call it, or with other shapes.

        Example::

            num_right, num_images = run.total([right, len(labels)])
        """
        local = torch.as_tensor(sums, dtype=sums.dtype if isinstance(sums, Tensor) else torch.float64).detach()
        self.steps.check_all("totals", tuple(local.shape))
        # A copy, because the sums are written over it. Booleans are counted, so they become integers.
        totals = local.to(self.device, torch.int64 if local.dtype == torch.bool else local.dtype, copy=True)
        if self._is_placeholder:
            totals.zero_()
        if self.world_size > 1:
            dist.all_reduce(totals)
        return totals.tolist()

    def gather(self, rows: Tensor | npt.NDArray[Any]) -> Tensor:
        """Return the ``rows``, (n, ...), of all workers in their order, (sum of n, ...). Each worker calls this.

        In a batch, a worker without images adds no rows. Gradients flow back to the rows of all workers: a loss that
        each worker computes from all rows, such as a contrastive one, counts once. Raises UsageError for a single
        number, and if only some workers call it, or with rows of other shapes or types.

        Example::

            features, labels = run.gather(normalize(model(batch.images))), run.gather(batch.labels)
        """
        local = torch.as_tensor(rows).to(self.device)
        if not local.ndim:
            raise UsageError(
                "run.gather got a single number, and takes rows; give it number[None], or let run.total(...) add up "
                "what each worker has."
            )
        self.steps.check_all("gathers", (tuple(local.shape[1:]), local.dtype))
        used = local[:0] if self._is_placeholder else local
        with self.steps.watch.paused():
            return used if self.world_size == 1 else gather_rows(used, self.steps.share)

    @property
    def _is_placeholder(self) -> bool:
        """True in a batch that has none of this worker's images."""
        microbatch = self.microbatch
        return self.steps.in_batch and not self.evaluating and microbatch is not None and not microbatch.num_used

    def _current_microbatch(self, call: str) -> Batch:
        """Return the batch or microbatch that the loop computes. Raises UsageError if it has not got a batch yet."""
        if self.microbatch is None:
            raise UsageError(
                f"The loop calls run.{call} before it has a batch; call it in `for batch in epoch:`, inside of `for "
                "epoch in run.epochs():`."
            )
        return self.microbatch

    def evaluate(self) -> dict[str, float]:
        """Evaluate the run on the validation images, and return the metrics by name. Every worker calls this.

        They are those of the loop's own evaluation, if :meth:`epochs` got one, and are added to the history.

        Example::

            if run.evaluate()["accuracy"] > 0.9:
                return
        """
        return self._measure(keeps_weights=True)

    def _evaluate_when_due(self) -> None:
        """Evaluate the run between two epochs, or after its last step.

        An evaluation of the loop's own may fail, so a checkpoint is written before the first one of an attempt.
        """
        if self.own_evaluation is not None:
            self.steps.save_before_own_evaluation()
        self._measure(keeps_weights=self.own_evaluation is not None)

    @torch.no_grad()
    def _measure(self, *, keeps_weights: bool) -> dict[str, float]:
        """Evaluate the run on the validation images, record the metrics and the pictures, and return the metrics.

        With ``keeps_weights``, the weights that were measured are kept for the checkpoint, because the evaluation may
        swap the network's weights while it runs. Raises UsageError if only some workers evaluate.
        """
        self.steps.check_all("evaluations")
        started = time.perf_counter()
        measured = self._evaluated(keeps_weights=keeps_weights)
        step = self.steps.record_evaluation(measured, self.thresholds)
        self.gallery.write(step, self.rank, self.world_size)
        suspicious = self.margins.lowest(NUM_SUSPICIOUS_SHOWN)
        if self.rank == 0:
            self.reporter.replace_suspicious_labels(suspicious)
        self.steps.metrics.exclude(time.perf_counter() - started)
        return measured

    def _evaluated(self, *, keeps_weights: bool = False) -> dict[str, float]:
        """Return the metrics on the images of ``_measured_part``, from the loop's own evaluation if it has one."""
        self.evaluating = True
        try:
            with self.models.evaluating(keeps_weights=keeps_weights):
                measured = self.evaluation(self) if self.own_evaluation is None else self.own_evaluation()
        except BaseException as error:
            # A loop may catch the exception and go on, so the evaluation is over. If memory lacked, the mark stays: the
            # error's sentence then says that it was an evaluation which did not fit.
            self.evaluating = lacks_memory(error)
            raise
        self.evaluating = False
        return measured

    def finish(self) -> Outcome:
        """End the run after the loop has returned, and return how it ended.

        The last evaluation and checkpoint are made if they are due. Then test images, if there are any, are measured.
        Raises UsageError if only some workers' loops have returned, or if the loop has made no step.
        """
        self.leave_batch()
        outcome = self.steps.finish(self._evaluate_when_due)
        if self.has_test and self.steps.test_is_due:
            self._measure_test()
            outcome = replace(outcome, progress=self.progress)
        self.gallery.close()
        self.files.close()
        return outcome

    @torch.no_grad()
    def _measure_test(self) -> None:
        """Evaluate the test images, once, with the networks of the best checkpoint, and record the metrics.

        No checkpoint follows. If the loop's own evaluation does not read the images, a note says so instead.
        """
        self.steps.load_best()
        self._measured_part, self._has_asked_for_images = "test", False
        measured = self._evaluated()
        if self._has_asked_for_images:
            self.steps.record_test(measured)
        else:
            self.steps.report_once(_TEST_NOT_READ)
