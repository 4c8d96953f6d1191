"""The one small all-reduce of a step, and the metric rows that its totals become."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.data.plan.batch_plan import GlobalBatch
from raytrain.errors import UsageError
from raytrain.runs.metric_row import OWN_COLUMNS, MetricRow
from raytrain.training.gradients import digest_of, digests_agree, own_group
from raytrain.training.protocols import Worker

_SECOND_RATE = "second_learning_rate"


@dataclass(frozen=True)
class StepTotals:
    """What the workers contribute to a step besides their metrics: one of them, or all of them added up."""

    num_used: float = 0  # images that can be used
    wait_s: float = 0.0  # seconds of waiting for the local batch
    stop_requests: float = 0
    checkpoint_requests: float = 0
    loops_returned: float = 0  # before the end of the run
    evaluations: float = 0  # that begin
    totals: float = 0  # calls of run.total, run.mean, run.gather and run.prepare
    means: float = 0
    gathers: float = 0
    prepares: float = 0
    optimizer_steps: float = 0  # in the batch before
    given: float = 0  # a digest of what must be the same in a call on all workers
    given_squared: float = 0


_NUM_TOTALS = len(dataclasses.fields(StepTotals))
_FIRST_NAME = _NUM_TOTALS + 2
_ROOM = 32  # for names: what workers send has one size, also if one of them logs what the others do not


class StepMetrics:
    """Adds up a step over the workers, and averages the steps between two rows of the history, which ``record`` gets.

    The all-reduce of a step starts before its forward and gives the number of used images to the backward. It carries
    what was logged in the step before. The host waits for nothing: on a GPU the totals reach it by a copy that has
    long finished when they are read. ``samples_seen`` are the used images of the run so far.
    """

    def __init__(self, worker: Worker, record: Callable[[MetricRow], None], samples_seen: int) -> None:
        self.samples_seen = samples_seen
        self._worker = worker
        self._record = record
        # Gloo ends a process that gets a sum of another size, such as one of batch norm, if workers are out of step.
        self._group = own_group(worker.device) if worker.world_size > 1 and worker.device.type == "cpu" else None
        self._names: tuple[str, ...] = ()
        self._sent_names = self._names
        self._logged = self._nothing_logged(_ROOM)
        self._host = self._sums = torch.zeros(0, dtype=torch.float64)
        self._copied = torch.cuda.Event() if worker.device.type == "cuda" else None
        self._work: dist.Work | None = None
        self._pending = False
        self._closed_row: MetricRow | None = None
        self._since = time.perf_counter()
        self._reset_row()

    def start(self, own: StepTotals) -> None:
        """Send this worker's contribution to a step, with what it logged in the step before."""
        self._sums, self._sent_names = self._contribution(own), self._names
        self._logged = self._nothing_logged(self._logged.shape[1])
        if self._worker.world_size > 1:
            self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)
        self._pending = True

    def joined(self, own: StepTotals) -> StepTotals:
        """The totals of what each worker gives now, beside those of the step."""
        sums = self._contribution(own)
        if self._worker.world_size > 1:
            dist.all_reduce(sums, group=self._group)
        return self._totals(sums.tolist())

    def num_used(self) -> Tensor:
        """Number of used images in the step's global batch, float64 () on the device. The host does not wait for it."""
        if self._pending:
            if self._work is not None:
                self._work.wait()
            if len(self._host) != len(self._sums):
                pinned = self._copied is not None
                self._host = torch.zeros(len(self._sums), dtype=torch.float64, pin_memory=pinned)
            self._host.copy_(self._sums, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._pending = False
        return self._sums[0]

    def log(self, values: Mapping[str, tuple[Tensor | float, Tensor | float]], *, counts: bool) -> None:
        """Add ``values`` to what travels with the next step: of each name a numerator and its denominator.

        All workers log the same names. Without ``counts``, nothing but the names is added.
        """
        new = tuple(name for name in values if name not in self._names)
        if new:
            _check_names(self._names + new)
            self._names += new
            while len(self._names) > self._logged.shape[1]:
                self._logged = torch.cat([self._logged, self._nothing_logged(_ROOM)], dim=1)
        if counts:
            numbers = [self._number(name, each) for name, pair in values.items() for each in pair]
            columns = torch.stack(numbers).view(-1, 2).T  # (2, number of values)
            if tuple(values) == self._names:
                self._logged[:, : len(values)] += columns
            else:
                self._logged[:, [self._names.index(name) for name in values]] += columns

    def _nothing_logged(self, room: int) -> Tensor:
        """Zeros (2, room): of each name that may be logged the sum of its numerators, and of its denominators."""
        return torch.zeros(2, room, dtype=torch.float64, device=self._worker.device)

    def _number(self, name: str, value: Tensor | float) -> Tensor:
        """The value as float64 () on the device. The host waits for it only if it is a tensor on another device."""
        if not isinstance(value, Tensor):
            return torch.full((), float(value), dtype=torch.float64, device=self._worker.device)
        if value.numel() != 1:
            raise UsageError(
                f"run.log({name}=...) got a tensor of the shape {tuple(value.shape)}; give one number, the mean over "
                "the images, or a vector of numbers."
            )
        return value.detach().to(self._worker.device, torch.float64).reshape(())

    def read(self) -> StepTotals:
        """Read and add the totals of a step, and record the row that ended with the step before, if one did."""
        self.num_used()
        if self._copied is not None:
            self._copied.synchronize()
        values = self._host.tolist()
        totals = self._totals(values)
        middle = (_FIRST_NAME + len(values)) // 2
        logged = zip(self._sent_names, values[_FIRST_NAME:middle], values[middle:], strict=False)
        for name, numerator, denominator in logged:
            if denominator:
                before = self._row_sums.get(name, (0.0, 0.0))
                self._row_sums[name] = before[0] + numerator, before[1] + denominator
        self._record_closed_row()
        self._row_images += totals.num_used
        self._row_wait_s += totals.wait_s
        self.samples_seen += int(totals.num_used)
        return totals

    def flush(self, own: StepTotals) -> StepTotals:
        """Reduce what was logged in the last step without another step, which would bring it otherwise."""
        self.start(own)
        return self.read()

    def close_row(self, batch: GlobalBatch, learning_rates: Sequence[float | Tensor]) -> None:
        """End the row with the step of ``batch``. All of the row is known now, except what was logged in that step.

        The history keeps the first of ``learning_rates``, and as a metric the first that is another one.
        """
        rates = [float(rate) for rate in learning_rates]
        others = [rate for rate in rates if rate != rates[0]]
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        self._since = now
        self._closed_row = MetricRow(
            kind="step",
            step=batch.step + 1,
            epoch=batch.epoch + 1,
            samples_seen=self.samples_seen,
            learning_rate=rates[0] if rates else 0.0,
            images_per_s=round(self._row_images / seconds, 1),
            data_wait_fraction=round(min(self._row_wait_s / self._worker.world_size / seconds, 1.0), 4),
            metrics={_SECOND_RATE: others[0]} if others else {},
        )

    def exclude(self, seconds: float) -> None:
        """Don't count the ``seconds`` of an evaluation as training time."""
        self._since += seconds

    def _contribution(self, own: StepTotals) -> Tensor:
        """The totals, a digest of the names, and what was logged: all numerators, then all denominators."""
        head = torch.tensor([*vars(own).values(), *digest_of(self._names)], dtype=torch.float64)
        return torch.cat([head.to(self._worker.device, non_blocking=True), self._logged.flatten()])

    def _totals(self, values: list[float]) -> StepTotals:
        """The sums of all workers' contributions. Raises UsageError, on all of them, if their names differ."""
        if not digests_agree(values[_NUM_TOTALS:_FIRST_NAME], self._worker.world_size):
            raise UsageError(
                f"The workers log different names (worker {self._worker.rank}: {', '.join(self._names) or 'none'}); "
                "call run.log with the same names on every worker: a metric is the mean over the images of all of them."
            )
        return StepTotals(*values[:_NUM_TOTALS])

    def _record_closed_row(self) -> None:
        if self._closed_row is not None:
            means = {name: numerator / denominator for name, (numerator, denominator) in self._row_sums.items()}
            self._record(dataclasses.replace(self._closed_row, metrics={**self._closed_row.metrics, **means}))
            self._closed_row = None
            self._reset_row()

    def _reset_row(self) -> None:
        self._row_images = self._row_wait_s = 0.0
        self._row_sums: dict[str, tuple[float, float]] = {}  # numerator and denominator of each name


def _check_names(names: Sequence[str]) -> None:
    """Raise UsageError if a metric would replace what each row of the history has, or another metric."""
    for name in names:
        if name in (*OWN_COLUMNS, _SECOND_RATE):
            raise UsageError(
                f"run.log({name}=...) would replace what the metrics history has as {name} already; give it another "
                "name."
            )
