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
from raytrain.training.checkpoint import Checkpoint, Checkpoints
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.evaluation import agreed
from raytrain.training.gradients import digest_of, digests_agree
from raytrain.training.loop_checks import LoopChecks
from raytrain.training.machine_meter import MachineMeter
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
_NOT_PREPARED = (
    "the evaluation calls no prepared network as a whole, so evaluate, export, predict and raytrain.load will use the "
    "first one, and may give other numbers: prepare the network that is measured, such as an average of the weights"
)
_CALLS = {
    "loops_returned": "returned",
    "evaluations": "called run.evaluate()",
    "totals": "called run.total",
    "gathers": "called run.gather",
    "prepares": "called run.prepare",
}


class Steps:
    """Counts the steps of a run on one worker, checks what the loop does in them, and does what is due after each."""

    def __init__(
        self,
        config: ResolvedConfig,
        plan: BatchPlan,
        models: PreparedModels,
        state: CheckpointState,
        checkpoints: Checkpoints,
        reporter: Reporter,
        worker: Worker,
        restored: Checkpoint | None,
    ) -> None:
        self._config, self._plan, self._models, self._state = config, plan, models, state
        self._checkpoints, self._reporter, self._worker = checkpoints, reporter, worker
        self.progress = restored.progress if restored else Progress()
        step = self.progress.step
        self._schedule = CheckpointSchedule(config, plan.steps_per_epoch, step if restored else None)
        self._trace = SampleTrace(checkpoints.store, worker.rank, step) if config.trace else None
        self.metrics = StepMetrics(worker, self._record, self.progress.samples_seen)
        self._machine = MachineMeter(worker.rank, worker.device, reporter.measured)
        self._early_stop = EarlyStop(config)
        self.learning_rates: list[float] = []  # of the groups that optimizers have stepped in this step
        self._num_here = 0  # steps of this start
        self.num_calls = 0  # of this start, that all workers make together
        self._has_gradients = False  # of a backward since the loop got its batch
        self._stepped = False  # an optimizer, since then
        self._has_gathered = False
        joins = worker.world_size > 1 and config.batch_norm == "sync"
        self._checks = LoopChecks(models, self._tell_once, batch_size=config.batch_size, joins=joins)
        self._start_reported = False
        self._told: set[str] = set()
        self._asked_at = step  # when the loop called run.batches last
        self.exhausted = False  # the loop has got all batches that it gets
        self.notes: Callable[[], Iterable[str]] = tuple  # what to tell of the loop after its first step
        self._kept_unmeasured = False  # before the first evaluation of the loop's own
        self._measured_last = False  # it has measured the run after them, and may have changed networks before

    def check_all(self, call: str, given: object = None) -> None:
        """The loop makes a ``call``, a field of StepTotals. Raises UsageError if not all workers do, with one shape."""
        self.num_calls += 1
        self._has_gathered |= call == "gathers"
        num_workers = self._worker.world_size
        if num_workers == 1:
            return
        number, squared = digest_of(given)
        totals = self.metrics.joined(StepTotals(given=number, given_squared=squared, **{call: 1}))
        step = self.progress.step + self._stepped
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
        """A step with the images of ``local`` begins, for which this worker has waited ``wait_s`` seconds."""
        self._local = local
        self._machine.step(len(local.labels), wait_s, self.progress.step)
        stop = self._reporter.stop_requested() or (self._worker.rank == 0 and self._early_stop.time_is_up())
        checkpoint = self._worker.rank == 0 and (self._reporter.checkpoint_requested() or self._schedule.due_by_time())
        self.metrics.start(StepTotals(len(local.labels), wait_s, stop, checkpoint))
        self._has_gradients = self._stepped = False
        self.learning_rates.clear()

    def backward(self, loss: Tensor, num_images: int) -> None:
        """The loop backpropagates ``loss``, of ``num_images`` images. Raises UsageError for a mistake of the loop."""
        self.num_calls += 1
        self._has_gradients = True
        self._checks.backward(loss, num_images, self._num_here, gathers=self._has_gathered)

    def log(self, sums: Mapping[str, Tensor | float], num_images: int) -> None:
        """The loop logs ``sums`` over ``num_images`` images. Raises UsageError for what is no such sum."""
        self._checks.log(sums, num_images, self._num_here)
        self.metrics.log(sums, counts=num_images > 0)

    def optimizer_steps(self) -> None:
        """The loop steps an optimizer; raises UsageError without a backward before it."""
        if not self._has_gradients:
            raise UsageError(
                "The loop calls run.step without run.backward before it in the same batch: without that the gradients "
                "are wrong."
            )
        self._stepped = True

    def end(self, evaluate: Callable[[], object]) -> bool:
        """The loop asks for its next batch: evaluate and write a checkpoint if they are due. Whether the run stops."""
        self.report_start()  # not earlier: the driver then reads ahead, which would slow down the first step
        if not self._stepped:
            raise UsageError(
                "The loop asks for the next batch without run.step(optimizer) for this one; every batch is one step, "
                "on every worker (several backwards before one step: loop over run.parts(batch), with --accumulate)."
            )
        totals = self._complete()
        step = self.progress.step
        _check_together(totals, self._worker.world_size, step)
        ends_run = step == self._plan.num_steps
        if totals.stop_requests and not ends_run:
            return True
        if (ends_run and not self._config.is_range_test) or self._evaluation_is_due():
            evaluate()
        if totals.checkpoint_requests or self._schedule.due_at(step):
            self._flush_and_save()
        return self._early_stop.reason is not None

    def before_own_evaluation(self) -> None:
        """Write a checkpoint before the loop's own evaluation first runs in a start: if it fails, no step is lost."""
        if not self._kept_unmeasured and self._schedule.saved_step != self.progress.step:
            self._flush_and_save(is_measured=False)
        self._kept_unmeasured = True

    def loop_failed(self) -> None:
        """The loop has raised an exception: wait for the checkpoint that is being written, unless storage hangs."""
        self._checkpoints.wait(_WRITTEN_WITHIN_S)

    def are_over(self, evaluate: Callable[[], object]) -> bool:
        """The loop calls run.batches: end a step after which it has left them. Return whether it gets no more.

        Evaluates if the run was stopped before an evaluation that was due. UsageError if one call gave several epochs.
        """
        num_given = self.progress.step - self._asked_at
        if self.exhausted and self.progress.step == self._plan.num_steps and num_given > self._plan.steps_per_epoch:
            raise UsageError(
                f"The loop calls run.batches() again after {num_given:,} steps to the end of the run: it gives the "
                "batches of all epochs, not of one; call it once, and do what is due after an epoch if (batch.step + "
                "1) % run.plan.steps_per_epoch == 0."
            )
        if self._stepped and not self.exhausted:
            self.exhausted = self.end(evaluate)
        elif self._evaluation_is_due() and self.progress.evaluated_step != self.progress.step:
            evaluate()
        self._asked_at = self.progress.step
        return self.exhausted

    def evaluated(self, measured: Mapping[str, float], thresholds: tuple[float, ...] | None) -> int:
        """Record what an evaluation has ``measured``; after which step it was."""
        measured = agreed(measured, self._worker.world_size)
        step = self.progress.step + self._stepped  # the current step counts once its optimizer has stepped
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
            self._tell_once(_NOT_PREPARED)
        epoch = epoch_of(step, self._plan.steps_per_epoch)
        self._record(MetricRow(kind="evaluation", step=step, epoch=epoch, metrics=dict(measured)))
        return step

    def finish(self, evaluate: Callable[[], object]) -> Outcome:
        """The loop has returned: record the last metrics, evaluate if it was left after the last step, and save.

        Raises UsageError if only some loops have, or if the run has no step.
        """
        if not self.exhausted and self._stepped:  # the loop returned after this step
            is_last = self.progress.step + 1 == self._plan.num_steps
            self.end(evaluate) if is_last else self._complete()
            self.exhausted = is_last
        if not self.exhausted and not self.progress.step:
            raise UsageError(
                "The loop has returned without a step; it goes over run.batches() to their end, and is a plain "
                "function, without yield and async."
            )
        totals = self.metrics.flush(StepTotals(loops_returned=not self.exhausted))
        _check_together(totals, self._worker.world_size, self.progress.step)
        self._models.end_part()
        if self._models.trained and (self._measured_last or self._schedule.due_at_end(self.progress.step)):
            self._save()
        self._checkpoints.close()
        checkpoint = self._checkpoints.newest
        if error := self._schedule.divergence:
            return Outcome(status="failed", progress=self.progress, checkpoint=checkpoint, error=error)
        status = "stopped" if self.progress.step < self._plan.num_steps else "finished"
        reason = self._early_stop.reason or (None if self.exhausted else StopReason("caller", "the loop returned"))
        return Outcome(status=status, progress=self.progress, checkpoint=checkpoint, stop_reason=reason)

    def _complete(self) -> StepTotals:
        batch = self._local.batch
        self._models.end_step(batch.step)
        self._has_gradients = self._stepped = False
        totals = self.metrics.read()
        step = batch.step + 1
        if self._trace is not None:
            self._trace.add(step, self._local.samples)
        self.progress = replace(self.progress, step=step, samples_seen=self.metrics.samples_seen)
        self._num_here += 1
        if step == 1 or step % self._config.log_every == 0 or step == self._plan.num_steps:
            self.metrics.close_row(batch, self.learning_rates)
        if self._num_here == 1:
            for note in self.notes():
                self._tell_once(note)
        if self._num_here & (self._num_here - 1) == 0:  # in the first steps, then more and more rarely
            others = self.metrics.flush(StepTotals())  # whoever starts a run waits for its first loss
            _check_together(others, self._worker.world_size, step)
            self._models.check_agreement(step)
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
        if self._trace is not None:
            self._trace.write()
            if self._worker.world_size > 1:
                dist.barrier()  # every worker's trace must be there before the checkpoint
        if self._worker.rank == 0 and not_finite is None:
            self._checkpoints.save(self._state.state_dict(), self.progress, before=self._reporter.flush)
        elif self._worker.rank == 0:
            self._reporter.event(CheckpointSkipped(step, f"the weight {not_finite} is not finite"))

    def _tell_once(self, note: str) -> None:
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
