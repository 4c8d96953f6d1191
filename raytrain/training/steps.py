"""Counts the steps of a run on one worker, and does what is due after each: a state machine.

A step is a batch that the loop gets, whether or not an optimizer steps in it. :class:`Run` calls :class:`Steps` in the
order in which its methods stand here. ``LoopPhase`` says where the loop is::

    open                  BETWEEN_EPOCHS    the loop asks for epochs
        begin             IN_BATCH          it gets a batch
        end_batch         BETWEEN_BATCHES   it asks for the next one, and so on
        leave_epoch       BETWEEN_BATCHES   instead, if it has left the epoch from within a batch
    end_epoch             BETWEEN_EPOCHS    it asks for the next epoch, and so on
    finish                                  it has returned

The last step leads to OVER, and a stop to STOPPED, which no call leaves. Three rules say when evaluations and
checkpoints are due:

- After the last batch of an epoch, nothing is done yet: the loop's own code after its loop over the batches, such as
  the step of a scheduler, belongs to the epoch. So ``end_epoch`` evaluates and saves.
- A loop may add up gradients over several batches. A checkpoint that falls due waits for a batch in which an optimizer
  steps, because an earlier checkpoint would lose the gradients.
- All workers decide alike. The counts and requests of each are summed in the one small all-reduce of a step
  (:mod:`raytrain.training.metrics.step_metrics`), and every worker reads the same totals. They also show whether only
  some of the workers made a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum, IntEnum
from typing import Any

import torch.distributed as dist
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.errors import UsageError, format_count
from raytrain.monitor.events import CheckpointSkipped, Note
from raytrain.monitor.snapshot import epoch_of
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Outcome, Progress, StopReason
from raytrain.training.checkpoint import Checkpoints, CheckpointSchedule
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.exact.agreement import agreed
from raytrain.training.loop_checks.loop_watch import LoopWatch
from raytrain.training.loop_checks.unprepared_networks import UnpreparedNetworks
from raytrain.training.metrics.early_stop import EarlyStop
from raytrain.training.metrics.machine_meter import MachineMeter
from raytrain.training.metrics.sample_trace import SampleTrace
from raytrain.training.metrics.step_metrics import StepMetrics, StepTotals
from raytrain.training.optimizer_steps import LateBackward, OptimizerSteps
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import Reporter, Worker

_WRITTEN_WITHIN_S = 60.0
_MOST_ACCUMULATED = 64  # batches without a step of an optimizer for which a checkpoint waits
_NOT_PREPARED = (
    "the evaluation calls no prepared network as a whole, so evaluate, export, predict and raytrain.load will use the "
    "first one, and may give other numbers: prepare the network that is measured, such as an average of the weights"
)


class LoopPhase(Enum):
    """Phase of this worker's loop, which decides what the loop may ask for next."""

    BETWEEN_EPOCHS = "between two epochs, or before the first one"
    IN_BATCH = "in a batch: it has not asked for the next one"
    BETWEEN_BATCHES = "between two batches of an epoch, or after the last one of an epoch whose end is still due"
    OVER = "after the last step, or an evaluation or a loss that ends the run: it gets no more batches"
    STOPPED = "after a stop, whose checkpoint is written: it gets no more batches"


class Due(IntEnum):
    """Action that is due, and waits while the loop adds up gradients. A later member includes those before it."""

    NOTHING = 0
    CHECKPOINT = 1
    STOP = 2  # a checkpoint, and then the end of the loop


class Steps:
    """Counts the steps of a run on one worker, and does what is due after each: checkpoints, evaluations, rows, stops.

    ``progress`` is how far the run has come, and ``phase`` where its loop is. Between steps they are the same on all
    workers.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        plan: BatchPlan,
        models: PreparedModels,
        state: CheckpointState,
        checkpoints: Checkpoints,
        reporter: Reporter,
        worker: Worker,
        progress: Progress,
        *,
        resumes: bool,
    ) -> None:
        self._config, self._plan, self._models, self._state = config, plan, models, state
        self._checkpoints, self._reporter, self._worker = checkpoints, reporter, worker
        # The state of the run.
        self.progress = progress
        self.phase = LoopPhase.BETWEEN_EPOCHS
        self._due = Due.NOTHING
        # Objects that are called in each step.
        self._schedule = CheckpointSchedule(config, plan.steps_per_epoch, progress.step if resumes else None)
        self._early_stop = EarlyStop(config)
        self._trace = SampleTrace(checkpoints.store, worker.rank, progress.step) if config.trace else None
        self._machine = MachineMeter(worker.rank, worker.device, reporter.note_machine_use)
        self.metrics = StepMetrics(worker, self._record, progress.samples_seen)
        self.optimizers = OptimizerSteps(config, models, state, worker, self.share, plan.num_steps)
        self.watch = LoopWatch(config, worker, models, self.report_once)
        self.unprepared = UnpreparedNetworks(state, self.report_once)
        self._late_backward = LateBackward(models, worker.world_size, self.report_once)
        self.notes: Callable[[], Iterable[str]] = tuple  # returns notes on the loop, reported after its first step
        # Counts of this worker: its images in the batch, and the images whose loss the loop computes. These are all of
        # them, or those of a microbatch.
        self._num_local = self._num_images = 0
        # Counts of this attempt, the same on all workers.
        self._num_steps_done = 0
        self._num_accumulated = 0  # batches since an optimizer has stepped
        self.num_calls = 0  # calls of the run that all workers make together
        # Things that an attempt does once.
        self._start_is_reported = False
        self._reported_notes: set[str] = set()
        self._has_tried_own_evaluation = False
        self._saved_digest: list[float] | None = None  # of the networks, in the checkpoint of the run's last step

    @property
    def in_batch(self) -> bool:
        """True while the loop has a batch, and has not asked for the next one."""
        return self.phase is LoopPhase.IN_BATCH

    @property
    def is_over(self) -> bool:
        """True as soon as the loop gets no more batches."""
        return self.phase in (LoopPhase.OVER, LoopPhase.STOPPED)

    def open(self, evaluate: Callable[[], object]) -> None:
        """Make ready for the epochs that the loop asks for: first end the batch and the epoch that it has left open.

        If the run resumes after a step whose evaluation is due, and was stopped before that, ``evaluate`` now.
        """
        if self.in_batch:
            self.end_batch()
        if self.phase is LoopPhase.BETWEEN_BATCHES and self._is_at_end_of_epoch():
            self.end_epoch(evaluate)
        elif self._measures_again():
            self.report_start()  # drops the row of an earlier attempt
            evaluate()
        if self.progress.step >= self._plan.num_steps:
            self.phase = LoopPhase.OVER

    def begin(self, local: LocalBatch, wait_s: float) -> None:
        """Begin a step with the batch ``local``, for which this worker has waited ``wait_s`` seconds.

        That starts the step's all-reduce, whose totals ``end_batch`` reads.
        """
        self.phase = LoopPhase.IN_BATCH
        self._late_backward.end_watch()
        self._num_local = self._num_images = len(local.labels)
        if self._trace is not None:
            self._trace.add(self.progress.step + 1, local.samples)
        self._machine.step(len(local.labels), wait_s, self.progress.step)

        # The all-reduce starts before the forward. It brings all workers the requests that any of them has got, and
        # shows whether all have stepped an optimizer in the batch before.
        has_stepped = self.optimizers.has_stepped
        self.optimizers.begin(local.batch.step)
        stop = self._reporter.stop_requested() or (self._worker.rank == 0 and self._early_stop.check_time())
        checkpoint = self._worker.rank == 0 and (self._reporter.checkpoint_requested() or self._schedule.due_by_time())
        self.metrics.start(StepTotals(len(local.labels), wait_s, stop, checkpoint, optimizer_steps=has_stepped))

    def begin_microbatch(self, num_images: int) -> None:
        """Weight losses and metrics by ``num_images``, of this worker's images, from now on."""
        self._num_images = num_images

    def share(self) -> Tensor | float:
        """Return m_j / M, by which the mean over this worker's images is weighted; exactly 0.0 without images.

        It is a tensor () if M, the sum over several workers, is on a GPU, so that the host need not wait for it.
        """
        if self._num_images == 0:
            return 0.0
        if self._worker.world_size == 1:
            return self._num_images / self._num_local
        if not self.in_batch:
            raise UsageError(
                "The loop runs a backward after it has asked for more batches and got none: compute with each batch "
                "before asking for the next one, which weights gradients by its own images; images are read ahead "
                "without that."
            )
        total = self.metrics.num_used()
        return self._num_images / (float(total) if total.is_cpu else total)

    def check_all(self, call: str, shapes: object = None) -> None:
        """Raise UsageError if not all workers make this ``call``, a field of StepTotals, with the same ``shapes``.

        All workers wait for each other here, by a small all-reduce.
        """
        self.num_calls += 1
        self.metrics.check_all(call, shapes, self.progress.step + self.in_batch)

    def end_batch(self) -> bool:
        """End the step; return True if the loop gets no more batches of this epoch.

        Within an epoch, a checkpoint that is due is written now, and a stop that is due ends the loop. After the last
        batch of an epoch, :meth:`end_epoch` does both, once the loop's own code has run.
        """
        self._complete_step_and_set_due()
        if not self._is_at_end_of_epoch():
            self._save_if_due()  # after a stop request, it also ends the loop
            if self._early_stop.reason:
                self.phase = LoopPhase.OVER
            if not self.is_over:
                return False
        self._late_backward.watch()
        return True

    def leave_epoch(self, num_left: int) -> None:
        """End the step from which the loop has left its epoch, and skip the ``num_left`` batches after it.

        A note reports that these are not used. They count as steps, because the plan decides what each step gets.
        """
        self._complete_step_and_set_due()
        if not num_left:
            return
        step = self.progress.step
        epoch = epoch_of(step, self._plan.steps_per_epoch)
        self.report_once(
            f"the loop left epoch {epoch} after step {step:,}, so {format_count(num_left, 'batch')} of it will not be "
            "used for training; --max-steps ends a run early"
        )
        self.progress = replace(self.progress, step=step + num_left)
        if self._schedule.due_at(step + num_left):
            self._due = max(self._due, Due.CHECKPOINT)

    def end_epoch(self, evaluate: Callable[[], object]) -> None:
        """End an epoch, or the run in the middle of one: evaluate and write a checkpoint if they are due.

        Raises UsageError if the loop has asked for no batch of the epoch.
        """
        self._late_backward.end_watch()
        if self.is_over:  # the run has stopped in the middle of the epoch
            return
        if self.phase is LoopPhase.BETWEEN_EPOCHS:
            raise UsageError(
                "The loop asks for the next epoch without a batch of the one before; go over the batches of each, as "
                "in `for epoch in run.epochs():` and `for batch in epoch:`."
            )
        self.phase = LoopPhase.BETWEEN_EPOCHS
        ends_run = self.progress.step == self._plan.num_steps
        if (ends_run and not self._config.is_range_test) or self._evaluation_is_due():
            evaluate()
        self._save_if_due()
        if ends_run or self._early_stop.reason:
            self.phase = LoopPhase.OVER

    def finish(self, evaluate: Callable[[], object]) -> Outcome:
        """End the run after the loop has returned: record the last metrics, evaluate if that is due, and save.

        Return how the run ended. It has failed if its last weights are not finite, so that they were not saved.
        Raises UsageError if only some workers' loops have returned, or if the run has no step.
        """
        self._late_backward.end_watch()
        # The loop may have returned from a batch. If it was the last one, the run is complete.
        if self.in_batch and self.progress.step + 1 == self._plan.num_steps:
            self.end_batch()
        elif self.in_batch:
            self._complete_step()
        if self.phase is LoopPhase.BETWEEN_BATCHES and self.progress.step == self._plan.num_steps:
            self.end_epoch(evaluate)
        if not self.is_over and not self.progress.step:
            raise UsageError(
                "The loop has returned without a step; it goes over the batches of run.epochs() to their end, and is a "
                "plain function, without yield and async."
            )
        self._flush_metrics(loop_returned=not self.is_over)
        self._models.join_statistics()

        # A loop may have changed its networks after the last step of the run, so that its checkpoint lacks the change.
        # The networks are then saved again. After a stop that is not needed, because a resume makes the same change.
        if self._models.trained:
            needs_checkpoint = self._schedule.due_at_end(self.progress.step)
            if not needs_checkpoint and self._saved_digest is not None:
                has_changed = self._models.digest() != self._saved_digest
                totals = self.metrics.joined(StepTotals(checkpoint_requests=has_changed))
                needs_checkpoint = totals.checkpoint_requests > 0
            if needs_checkpoint:
                self._save()
        self._checkpoints.close()

        checkpoint = self._checkpoints.newest
        if error := self._schedule.divergence:
            return Outcome(status="failed", progress=self.progress, checkpoint=checkpoint, error=error)
        # A search for a learning rate is finished once the loss explodes.
        reason = self._early_stop.reason or self._early_stop.time_reason
        has_exploded = self._config.is_range_test and reason is not None and reason.kind == "diverged"
        has_ended = has_exploded or self.progress.step >= self._plan.num_steps
        status = "finished" if has_ended else "stopped"
        reason = reason or (None if self.is_over else StopReason("caller", "the loop returned"))
        return Outcome(status=status, progress=self.progress, checkpoint=checkpoint, stop_reason=reason)

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, for at most a minute, as storage may hang."""
        self._checkpoints.wait(_WRITTEN_WITHIN_S)

    # Within a step.

    def _complete_step_and_set_due(self) -> None:
        """Complete the step, and set ``_due`` if a request or an option asks for a checkpoint or a stop after it."""
        self.report_start()  # not earlier: after it the driver reads ahead, which would slow down the first step
        totals = self._complete_step()
        if totals.stop_requests and self.progress.step < self._plan.num_steps:
            self._due = Due.STOP
        elif totals.checkpoint_requests or self._schedule.due_at(self.progress.step):
            self._due = max(self._due, Due.CHECKPOINT)

    def _complete_step(self) -> StepTotals:
        """Count the step that the loop is in, and return its totals over all workers.

        If the history gets a row after this step, the row is closed. After some steps, the workers are compared, which
        raises UsageError if they differ.
        """
        self.phase = LoopPhase.BETWEEN_BATCHES
        self._models.join_statistics()
        totals = self.metrics.read()
        step = self.progress.step + 1
        self.progress = replace(self.progress, step=step, samples_seen=self.metrics.samples_seen)
        self._num_steps_done += 1
        is_first_of_epoch = (step - 1) % self._plan.steps_per_epoch == 0
        self._late_backward.end_step(
            self.optimizers.has_stepped, is_first=self._num_steps_done == 1 or is_first_of_epoch
        )
        self._num_accumulated = 0 if self.optimizers.has_stepped else self._num_accumulated + 1
        self.optimizers.end()
        # Its metrics come with the next step's all-reduce, so the row is recorded then.
        if step == 1 or step % self._config.log_every == 0 or step == self._plan.num_steps:
            epoch = epoch_of(step, self._plan.steps_per_epoch)
            self.metrics.close_row(step, epoch, self.optimizers.take_learning_rates())

        # After the first step it is known which options and outputs of the network the loop uses.
        if self._num_steps_done == 1:
            for note in (*self.notes(), *self._state.notes_on_freezing(within_epoch=not is_first_of_epoch)):
                self.report_once(note)

        # Compare the workers after steps 1, 2, 4, 8, … of this attempt, the powers of 2: most mistakes show at once.
        if self._num_steps_done & (self._num_steps_done - 1) == 0:
            self._flush_metrics()  # at once, because whoever starts a run waits for its first loss
            self._models.check_agreement(step)
            self.optimizers.check_agreement(step)
        self.watch.compare()  # which does nothing unless the step was watched
        return totals

    def _flush_metrics(self, *, loop_returned: bool = False) -> None:
        """Record the metrics of the last step now, instead of with the next step's all-reduce.

        Raises UsageError if not all workers did the same in it, or if only some of their loops have returned.
        """
        totals = self.metrics.flush(StepTotals(loops_returned=loop_returned))
        totals.check_together(self._worker.world_size, self.progress.step)

    def _is_at_end_of_epoch(self) -> bool:
        """Return whether the last completed step ends an epoch or the run."""
        return self.progress.step % self._plan.steps_per_epoch == 0 or self.progress.step == self._plan.num_steps

    # Evaluations.

    def _evaluation_is_due(self) -> bool:
        """Return whether an evaluation is due after the last completed step, by ``--evaluate-every``."""
        every = self._config.evaluate_every * self._plan.steps_per_epoch
        return every > 0 and self.progress.step > 0 and self.progress.step % every == 0

    def _measures_again(self) -> bool:
        """Return whether an evaluation is due after the last completed step that its checkpoint does not have."""
        return self._evaluation_is_due() and self.progress.evaluated_step != self.progress.step

    def save_before_own_evaluation(self) -> None:
        """Write a checkpoint before the loop's own evaluation, which may fail, runs for the first time in an attempt.

        Later calls in the attempt do nothing.
        """
        if not self._has_tried_own_evaluation and self._schedule.saved_step != self.progress.step:
            self._flush_metrics()
            self._save(is_measured=False)
        self._has_tried_own_evaluation = True

    def record_evaluation(self, measured: Mapping[str, Any], thresholds: tuple[float, ...] | None) -> int:
        """Record the metrics that an evaluation has ``measured``; return the number of steps that it comes after.

        ``thresholds`` are the probabilities from which on an image has a class, if it may have several. The evaluation
        may end the run, by --until or --patience, unless a stop has ended it already. Raises UsageError if the workers
        have measured different numbers.
        """
        metrics = agreed(measured, self._worker.world_size)
        # In a batch, the weights are those after the batch's step if an optimizer has stepped already.
        step = self.progress.step + (self.in_batch and self.optimizers.has_stepped)
        progress = replace(
            self.progress,
            validation_accuracy=metrics.get("accuracy"),
            validation_loss=metrics.get("loss"),
            evaluated_step=step,
            thresholds=thresholds,
            network=self._models.measured(),
        )
        # After a stop, no checkpoint follows: what the loop does then, such as a scheduler's step, a resume does again.
        # So the evaluation only shows where the run is; a run without the stop would not have made it.
        if self.phase is LoopPhase.STOPPED:
            self.progress = progress
        else:
            self.progress = self._early_stop.judge_evaluation(progress, metrics)
            # A loop that evaluates after its last epoch may have changed the networks before.
            if self.is_over:
                self._schedule.forget_checkpoint()
        if metrics and progress.network is None:
            self.report_once(_NOT_PREPARED)
        epoch = epoch_of(step, self._plan.steps_per_epoch)
        self._record(MetricRow(kind="evaluation", step=step, epoch=epoch, metrics=metrics))
        return step

    @property
    def test_is_due(self) -> bool:
        """True at the end of a run: after all steps, or ended by --until or --patience. A stop is not the end."""
        reason = self._early_stop.reason
        has_converged = reason is not None and reason.kind in ("target", "patience")
        is_complete = self.progress.step >= self._plan.num_steps
        return (is_complete or has_converged) and not self._config.is_range_test and self._schedule.divergence is None

    def load_best(self) -> None:
        """Restore everything that the loop has prepared from the best checkpoint, unless that is of the last step."""
        best = self._checkpoints.load_best(self._worker.device, self.progress.step)
        if best is not None:
            self._state.load_again(best.state)

    def record_test(self, measured: Mapping[str, Any]) -> None:
        """Record the metrics ``measured`` on the test images. Raises UsageError if the workers' numbers differ."""
        metrics = agreed(measured, self._worker.world_size)
        self.progress = replace(self.progress, test_accuracy=metrics.get("accuracy"), test_loss=metrics.get("loss"))
        epoch = epoch_of(self.progress.step, self._plan.steps_per_epoch)
        self._record(MetricRow(kind="test", step=self.progress.step, epoch=epoch, metrics=metrics))

    # Checkpoints.

    def _save_if_due(self) -> None:
        """Write the checkpoint that is due, and end the loop if a stop is due.

        While the loop adds up gradients, which a checkpoint would lose, both wait: for at most 64 batches, and not
        after the last step of the run.
        """
        if self._due is Due.NOTHING:
            return
        # A loop that has neither prepared an optimizer nor stepped one in this attempt adds nothing up.
        has_optimizers = bool(self._state.optimizers) or self._num_accumulated < self._num_steps_done
        adds_up_for_all = has_optimizers and 0 < self._num_accumulated < _MOST_ACCUMULATED
        # One of several optimizers may step more rarely than the others.
        adds_up_for_one = any(0 < number < _MOST_ACCUMULATED for number in self.optimizers.num_waiting.values())
        if (adds_up_for_all or adds_up_for_one) and self.progress.step < self._plan.num_steps:
            return
        self._flush_metrics()  # a run that resumes from this checkpoint never records the step again
        self._save()
        if self._due is Due.STOP:
            self.phase = LoopPhase.STOPPED
        self._due = Due.NOTHING

    def _save(self, *, is_measured: bool = True) -> None:
        """Write a checkpoint in the background, unless a weight is not finite: then an event reports that.

        One before an evaluation (not ``is_measured``) does not count for the schedule, so that another one follows the
        evaluation. A search for a learning rate writes none. All workers call this; raises UsageError if they differ.
        """
        step = self.progress.step
        if self._config.is_range_test:
            self._schedule.note_checkpoint(step)
            return

        # All workers find out whether the weights are worth keeping: equal on all of them, and finite.
        self._models.check_agreement(step)
        self.optimizers.check_agreement(step)
        not_finite = self._models.first_not_finite()
        if is_measured:
            self._schedule.note_checkpoint(step, not_finite)
        self._saved_digest = self._models.digest() if step == self._plan.num_steps else None

        # Every worker's part must arrive before the checkpoint: its trace in storage, its metrics on worker 0.
        if self._trace is not None:
            self._trace.write()
            if self._worker.world_size > 1:
                dist.barrier()
        metrics = self._state.joined_metrics(self._worker.world_size)

        # Worker 0 writes the rest, with the weights that were measured if an evaluation swapped them.
        if self._worker.rank == 0 and not_finite is None:
            swapped = self._models.swapped_weights() if self.progress.evaluated_step == step else {}
            network = next(iter(swapped), self.progress.network)
            is_own = bool(self._models.trained) and self._models.is_built_by_loop()
            progress = replace(self.progress, network=network, is_own_network=is_own)
            state = {**self._state.state_dict(), **metrics, **swapped}
            self._checkpoints.save(state, progress, before=self._reporter.flush)
        elif self._worker.rank == 0:
            self._reporter.note_event(CheckpointSkipped(step, f"the weight {not_finite} is not finite"))

    # What is reported and recorded.

    def report_start(self) -> None:
        """Report, once in an attempt, that the workers train; then the driver begins to read ahead."""
        if self._worker.rank == 0 and not self._start_is_reported:
            self._reporter.note_start(self._worker.world_size, self.progress.step, self._measures_again())
        self._start_is_reported = True

    def report_once(self, note: str) -> None:
        """Report a ``note`` to whoever watches the run, unless this attempt has reported it."""
        if self._worker.rank == 0 and note not in self._reported_notes:
            self._reported_notes.add(note)
            self._reporter.note_event(Note(note))

    def _record(self, row: MetricRow) -> None:
        """Add a ``row`` to the history: worker 0 sends it to its reporter.

        All workers have the same row, and judge by its loss whether a search for a learning rate is over.
        """
        if row.kind == "step":
            self._early_stop.judge_training(row)
        if self._worker.rank == 0:
            self._reporter.record(row)
