"""The books of a run's steps: counts and requests, metrics, samples, what is due, and the rules that loops keep."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch.distributed as dist
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.monitor.events import CheckpointSkipped, Note
from raytrain.monitor.snapshot import epoch_of
from raytrain.runs.documents import TRACE
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Outcome, Progress, StopReason
from raytrain.storage.store import Store
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.evaluation import agreed
from raytrain.training.gradients import digest_of, digests_agree
from raytrain.training.machine_meter import MachineMeter
from raytrain.training.optimizer_steps import OptimizerSteps
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import Reporter, Worker
from raytrain.training.schedule import CheckpointSchedule, EarlyStop
from raytrain.training.step_metrics import StepMetrics, StepTotals

_LAST_STEP = re.compile(r"-(\d{9})-\d{5}\.parquet$")


class SampleTrace:
    """Rows of step (counted from 1) and sample (index into the manifest), in one file for each worker and checkpoint.

    A file is written before the checkpoint that completes its steps. Files of steps after the newest checkpoint belong
    to steps that a failure has undone; worker 0 deletes them when the run resumes.
    """

    def __init__(self, store: Store, rank: int, first_step: int) -> None:
        self._store = store
        self._rank = rank
        self._steps: list[tuple[int, Int64s]] = []
        if rank == 0:
            self._delete_after(first_step)

    def add(self, step: int, samples: Int64s) -> None:
        """Note that this worker used ``samples``, indices into the manifest, in ``step`` (counted from 1)."""
        self._steps.append((step, samples))

    def write(self) -> None:
        """Write the steps since the last call."""
        if not self._steps:
            return
        steps = np.repeat([step for step, _ in self._steps], [len(samples) for _, samples in self._steps])
        table = pa.table({"step": steps, "sample": np.concatenate([samples for _, samples in self._steps])})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer)
        first, last = self._steps[0][0], self._steps[-1][0]
        self._store.put(f"{TRACE}{first:09d}-{last:09d}-{self._rank:05d}.parquet", buffer.getvalue())
        self._steps.clear()

    def _delete_after(self, step: int) -> None:
        for found in list(self._store.list(TRACE)):
            if (last := _LAST_STEP.search(found.path)) and int(last[1]) > step:
                self._store.delete(found.path)


_WRITTEN_WITHIN_S = 60.0
_MOST_ACCUMULATED = 64  # batches without a step of an optimizer for which a checkpoint waits
_NOT_PREPARED = (
    "the evaluation calls no prepared network as a whole, so evaluate, export, predict and raytrain.load will use the "
    "first one, and may give other numbers: prepare the network that is measured, such as an average of the weights"
)
_CALLS = {
    "loops_returned": "returned",
    "optimizer_steps": "had stepped an optimizer in its last batch",
    "evaluations": "called run.evaluate()",
    "totals": "called run.total",
    "means": "called run.mean",
    "gathers": "called run.gather",
    "prepares": "called run.prepare",
}


class Steps:
    """Counts the steps of a run on one worker, and does what is due after each: checkpoints, evaluations, rows, stops.

    A step is a batch that the loop gets. The loop is outside of the epochs, between two batches of an epoch or in one:
    ``begin`` opens a batch, and ``end_batch`` closes it when the loop asks for the next one. The last batch of an epoch
    leaves open what is due, for the loop's own code that follows its loop over the batches, such as the step of a
    scheduler, belongs to that epoch. ``end_epoch`` does it when the loop asks for the next epoch.

    A loop may add up gradients over several batches, so a checkpoint that falls due waits for a batch in which an
    optimizer steps: one before would lose the gradients.
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
        self.progress = progress
        step = progress.step
        self._schedule = CheckpointSchedule(config, plan.steps_per_epoch, step if resumes else None)
        self._trace = SampleTrace(checkpoints.store, worker.rank, step) if config.trace else None
        self.metrics = StepMetrics(worker, self._record, progress.samples_seen)
        self.optimizers = OptimizerSteps(config, models, state, worker, self.share, plan.num_steps)
        self._machine = MachineMeter(worker.rank, worker.device, reporter.measured)
        self._early_stop = EarlyStop(config)
        self._local: LocalBatch | None = None  # of the batch that the loop is in
        self._num_local = 0  # images of this worker in the batch
        self._num_images = 0  # those of them whose loss the loop computes: all, or those of a part
        self._num_here = 0  # steps of this attempt
        self.compare_loops: Callable[[], None] = lambda: None  # on all workers, after each of the first steps
        self._num_accumulated = 0  # batches since an optimizer has stepped
        self._steps_optimizers = False  # in some batch of this attempt
        self.num_calls = 0  # of this attempt, that all workers make together
        self._start_reported = False
        self._told: set[str] = set()
        self._stops = False  # a stop was requested, and waits for its checkpoint
        self._save_is_due = False
        self._epoch_is_open = False  # the loop has got a batch of an epoch that has not ended yet
        self.exhausted = False  # the loop gets no more batches
        self.notes: Callable[[], Iterable[str]] = tuple  # what to report of the loop after its first step
        self._kept_unmeasured = False  # before the first evaluation of the loop's own
        self._measured_last = False  # it has measured the run after them, and may have changed networks before
        self._saved_digest: list[float] | None = None  # of the networks, in the checkpoint of the run's last step

    @property
    def in_batch(self) -> bool:
        """Whether the loop has a batch, and has not asked for the next one."""
        return self._local is not None

    def share(self) -> Tensor | float:
        """Return m_j / M, by which the mean over this worker's images is weighted; exactly 0.0 without images."""
        if self._num_images == 0:
            return 0.0
        if self._worker.world_size == 1:
            return self._num_images / self._num_local
        total = self.metrics.num_used()
        return self._num_images / (float(total) if total.is_cpu else total)

    def begin_part(self, num_images: int) -> None:
        """From now on the loop computes the loss of ``num_images`` of this worker's images."""
        self._num_images = num_images

    def check_all(self, call: str, given: object = None) -> None:
        """The loop makes a ``call``, a field of StepTotals. Raises UsageError if not all workers do, with one shape."""
        self.num_calls += 1
        num_workers = self._worker.world_size
        if num_workers == 1:
            return
        number, squared = digest_of(given)
        totals = self.metrics.joined(StepTotals(given=number, given_squared=squared, **{call: 1}))
        step = self.progress.step + self.in_batch
        _check_together(totals, num_workers, step)
        if not digests_agree((totals.given, totals.given_squared), num_workers):
            raise UsageError(
                f"After step {step:,} the loop {_CALLS[call]} with other shapes on worker {self._worker.rank} than on "
                f"another: {given!s:.80}; every worker must give the same."
            )

    def report_start(self) -> None:
        """Report, once, that the workers train: from now on the driver reads ahead."""
        if self._worker.rank == 0 and not self._start_reported:
            self._reporter.started(self._worker.world_size, self.progress.step)
        self._start_reported = True

    def begin(self, local: LocalBatch, wait_s: float) -> None:
        """Open the batch ``local``, for which this worker has waited ``wait_s`` seconds."""
        has_stepped = self.optimizers.has_stepped
        self._local, self._epoch_is_open = local, True
        self._num_local = self._num_images = len(local.labels)
        self._machine.step(len(local.labels), wait_s, self.progress.step)
        self.optimizers.begin(local.batch.step)
        stop = self._reporter.stop_requested() or (self._worker.rank == 0 and self._early_stop.time_is_up())
        checkpoint = self._worker.rank == 0 and (self._reporter.checkpoint_requested() or self._schedule.due_by_time())
        own = StepTotals(len(local.labels), wait_s, stop, checkpoint, optimizer_steps=has_stepped)
        self.metrics.start(own)

    def end_batch(self) -> bool:
        """Close the batch that the loop is in, and do what is due within its epoch. Return whether that is over."""
        self._close_batch()
        if self._ends_epoch(self.progress.step):
            return True
        if self._stops or self._save_is_due:
            self._save_if_complete()
        self.exhausted |= self._early_stop.reason is not None
        return self.exhausted

    def leave_epoch(self, num_left: int) -> None:
        """Close the batch in which the loop has left its epoch, and skip the ``num_left`` batches after it."""
        self._close_batch()
        step = self.progress.step
        if num_left:
            epoch = epoch_of(step, self._plan.steps_per_epoch)
            self.report_once(
                f"the loop left epoch {epoch} after step {step:,}, so {num_left:,} batches of it are not used for "
                "training; --max-steps ends a run early"
            )
            self.progress = replace(self.progress, step=step + num_left)
            self._save_is_due |= self._schedule.due_at(step + num_left)

    def end_epoch(self, evaluate: Callable[[], object]) -> None:
        """Do what is due after an epoch, or after the last step of the run, which may be in the middle of one.

        Raises UsageError if the loop has not used the epoch.
        """
        if not self.exhausted and not self._epoch_is_open:
            raise UsageError(
                "The loop asks for the next epoch without a batch of the one before; go over the batches of each, as "
                "in `for epoch in run.epochs():` and `for batch in epoch:`."
            )
        self._epoch_is_open = False
        if self.exhausted:  # the run has stopped in the middle of the epoch
            return
        ends_run = self.progress.step == self._plan.num_steps
        if (ends_run and not self._config.is_range_test) or self._evaluation_is_due():
            evaluate()
        if self._stops or self._save_is_due:
            self._save_if_complete()
        self.exhausted |= ends_run or self._early_stop.reason is not None

    def _close_batch(self) -> None:
        """Complete a step, and note what is due after it."""
        self.report_start()  # not earlier: the driver then reads ahead, which would slow down the first step
        totals = self._complete()
        step = self.progress.step
        self._stops |= bool(totals.stop_requests) and step < self._plan.num_steps
        self._save_is_due |= bool(totals.checkpoint_requests) or self._schedule.due_at(step)

    def _save_if_complete(self) -> None:
        """Write the checkpoint that is due, and stop if that was requested, unless gradients are being added up."""
        steps_optimizers = self._state.has_optimizers or self._steps_optimizers
        waits = steps_optimizers and 0 < self._num_accumulated < _MOST_ACCUMULATED
        if waits and self.progress.step < self._plan.num_steps:
            return
        self._save_is_due = False
        self._flush_and_save()
        self.exhausted |= self._stops

    def _ends_epoch(self, step: int) -> bool:
        return step % self._plan.steps_per_epoch == 0 or step == self._plan.num_steps

    def before_own_evaluation(self) -> None:
        """Write a checkpoint before the loop's own evaluation first runs in a start: if it fails, no step is lost."""
        if not self._kept_unmeasured and self._schedule.saved_step != self.progress.step:
            self._flush_and_save(is_measured=False)
        self._kept_unmeasured = True

    def loop_failed(self) -> None:
        """The loop has raised an exception: wait for the checkpoint that is being written, unless storage hangs."""
        self._checkpoints.wait(_WRITTEN_WITHIN_S)

    def open(self, evaluate: Callable[[], object]) -> None:
        """The loop asks for epochs: end what it has left open, or evaluate a run that was stopped before it was due."""
        if self.in_batch:
            self.end_batch()
        if self._epoch_is_open and self._ends_epoch(self.progress.step):
            self.end_epoch(evaluate)
        elif self._evaluation_is_due() and self.progress.evaluated_step != self.progress.step:
            evaluate()
        self.exhausted |= self.progress.step >= self._plan.num_steps

    def evaluated(self, measured: Mapping[str, float], thresholds: tuple[float, ...] | None) -> int:
        """Record what an evaluation has ``measured``; after which step it was."""
        measured = agreed(measured, self._worker.world_size)
        step = self.progress.step + (self.in_batch and self.optimizers.has_stepped)
        progress = replace(
            self.progress,
            test_accuracy=measured.get("accuracy"),
            test_loss=measured.get("loss"),
            evaluated_step=step,
            thresholds=thresholds,
            network=self._models.measured(),
        )
        self.progress = self._early_stop.evaluated(progress, measured)
        self._measured_last = self.exhausted
        if measured and progress.network is None:
            self.report_once(_NOT_PREPARED)
        epoch = epoch_of(step, self._plan.steps_per_epoch)
        self._record(MetricRow(kind="evaluation", step=step, epoch=epoch, metrics=dict(measured)))
        return step

    def finish(self, evaluate: Callable[[], object]) -> Outcome:
        """The loop has returned: record the last metrics, evaluate if it was left after the last step, and save.

        Raises UsageError if only some loops have, or if the run has no step.
        """
        if self.in_batch:  # the loop returned from it
            self.end_batch() if self.progress.step + 1 == self._plan.num_steps else self._complete()
        if self._epoch_is_open and self.progress.step == self._plan.num_steps:
            self.end_epoch(evaluate)
        if not self.exhausted and not self.progress.step:
            raise UsageError(
                "The loop has returned without a step; it goes over the batches of run.epochs() to their end, and is a "
                "plain function, without yield and async."
            )
        totals = self.metrics.flush(StepTotals(loops_returned=not self.exhausted))
        _check_together(totals, self._worker.world_size, self.progress.step)
        self._models.join_statistics()
        if self._models.trained and self._last_save_is_due():
            self._save()
        self._checkpoints.close()
        checkpoint = self._checkpoints.newest
        if error := self._schedule.divergence:
            return Outcome(status="failed", progress=self.progress, checkpoint=checkpoint, error=error)
        status = "stopped" if self.progress.step < self._plan.num_steps else "finished"
        reason = self._early_stop.reason or (None if self.exhausted else StopReason("caller", "the loop returned"))
        return Outcome(status=status, progress=self.progress, checkpoint=checkpoint, stop_reason=reason)

    def _last_save_is_due(self) -> bool:
        """Whether the checkpoint of the last step lacks something that the loop did after its last batch."""
        if self._measured_last or self._schedule.due_at_end(self.progress.step):
            return True
        if self._saved_digest is None:  # stopped: what a loop does after a stop is done again by a resume
            return False
        changed = self._models.digest() != self._saved_digest
        return self.metrics.joined(StepTotals(checkpoint_requests=changed)).checkpoint_requests > 0

    def _complete(self) -> StepTotals:
        """Close the batch that the loop is in: read its totals, and record what is known of it."""
        assert self._local is not None
        local, self._local = self._local, None
        batch = local.batch
        self._models.join_statistics()
        totals = self.metrics.read()
        step = batch.step + 1
        has_stepped = self.optimizers.has_stepped
        self._steps_optimizers |= has_stepped
        self._num_accumulated = 0 if has_stepped else self._num_accumulated + 1
        if self._trace is not None:
            self._trace.add(step, local.samples)
        self.progress = replace(self.progress, step=step, samples_seen=self.metrics.samples_seen)
        self._num_here += 1
        if step == 1 or step % self._config.log_every == 0 or step == self._plan.num_steps:
            self.metrics.close_row(batch, self.optimizers.learning_rates)
        if self._num_here == 1:
            for note in self.notes():
                self.report_once(note)
        if self._num_here & (self._num_here - 1) == 0:  # in the first steps, then more and more rarely
            others = self.metrics.flush(StepTotals())  # whoever starts a run waits for its first loss
            _check_together(others, self._worker.world_size, step)
            self._models.check_agreement(step)
            self.compare_loops()
        return totals

    def _evaluation_is_due(self) -> bool:
        every = self._config.evaluate_every * self._plan.steps_per_epoch
        return every > 0 and self.progress.step > 0 and self.progress.step % every == 0

    def _flush_and_save(self, *, is_measured: bool = True) -> None:
        flushed = self.metrics.flush(StepTotals())  # a run that resumes from here never records this step again
        _check_together(flushed, self._worker.world_size, self.progress.step)
        self._save(is_measured=is_measured)

    def _save(self, *, is_measured: bool = True) -> None:
        """Write a checkpoint; one that ``is_measured`` is the last that this step needs."""
        step = self.progress.step
        if self._config.is_range_test:
            self._schedule.attempted(step)
            return
        self._models.check_agreement(step)
        not_finite = self._models.not_finite()  # the same on every worker
        if is_measured:
            self._schedule.attempted(step, not_finite)
        self._saved_digest = self._models.digest() if step == self._plan.num_steps else None
        if self._trace is not None:
            self._trace.write()
            if self._worker.world_size > 1:
                dist.barrier()  # every worker's trace must be there before the checkpoint
        metrics = self._state.joined_metrics(self._worker.world_size)
        if self._worker.rank == 0 and not_finite is None:
            swapped = self._models.swapped_weights() if self.progress.evaluated_step == step else {}
            network = next(iter(swapped), self.progress.network)
            is_own = bool(self._models.trained) and self._models.is_own()
            progress = replace(self.progress, network=network, is_own_network=is_own)
            state = {**self._state.state_dict(), **metrics, **swapped}
            self._checkpoints.save(state, progress, before=self._reporter.flush)
        elif self._worker.rank == 0:
            self._reporter.event(CheckpointSkipped(step, f"the weight {not_finite} is not finite"))

    def report_once(self, note: str) -> None:
        """Report a ``note`` for whoever watches the run, unless this attempt has."""
        if self._worker.rank == 0 and note not in self._told:
            self._told.add(note)
            self._reporter.event(Note(note))

    def _record(self, row: MetricRow) -> None:
        if row.kind == "step":
            self._early_stop.trained(row)  # on every worker, which all know the same row
        if self._worker.rank == 0:
            self._reporter.record(row)


def _check_together(totals: StepTotals, num_workers: int, step: int) -> None:
    """Raise UsageError if the loop did, after ``step`` completed steps, on some workers what it did not on others."""
    for call, what in _CALLS.items():
        number: float = getattr(totals, call)
        if 0 < number < num_workers:
            raise UsageError(
                f"After step {step:,} the loop {what} on {number:.0f} of {num_workers} workers and continued on the "
                "others; every worker must take the same steps: decide by what all of them know, such as "
                "run.total(...)."
            )
