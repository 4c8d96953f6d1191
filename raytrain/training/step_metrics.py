"""The one small all-reduce of a step, and the metric rows that its totals become.

The way of a metric: :meth:`StepMetrics.log` adds a numerator and a denominator to ``_logged``; with the next step
:meth:`~StepMetrics.start` sends them, summed over the workers; :meth:`~StepMetrics.read` adds the sums to those of the
steps since the last row, and records the row, in which each metric is their quotient.

The all-reduce of a step starts before its forward and gives the number of used images to the backward. Its sums are
copied to the host at once, so that a GPU, which has them before the step, never waits for the host to read them:

- Several workers read the sums when the step ends, for all of them must stop after the same one. Then the host waits
  until the GPU begins the step, of which it has handed out all by then.
- One worker knows its own counts. It reads what was logged a step late, or at once if a row of the history waits.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.errors import UsageError
from raytrain.runs.metric_row import OWN_COLUMNS, MetricRow
from raytrain.training.agreement import digest_of, digests_agree
from raytrain.training.gradients import own_group
from raytrain.training.protocols import Worker

_SECOND_RATE = "second_learning_rate"
_stream = cache(torch.cuda.Stream)  # of each GPU one, on which sums are copied to the host


@dataclass(frozen=True)
class StepTotals:
    """Counts of a step that travel beside its metrics: of one worker, or of all workers, added up."""

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
    digest: float = 0  # of what must be the same in a call on all workers
    digest_squared: float = 0


_NUM_TOTALS = len(dataclasses.fields(StepTotals))
_FIRST_METRIC = _NUM_TOTALS + 2  # after the totals and the digest of the names
_ROOM = 32  # for names: what workers send has one size, also if one of them logs what the others do not


@dataclass(frozen=True)
class _Sums:
    """The sums of one step, on their way to the host."""

    names: tuple[str, ...]  # of what was logged before the step
    denominators: Mapping[str, float]  # what one worker's host knows of them, in addition to the numbers
    numbers: Tensor  # float64 (n,), on the host; those of several workers begin with totals and a digest of the names
    copied: torch.cuda.Event | None  # None if the numbers were computed on the host


@dataclass
class _OpenRow:
    """Counts and metrics of all workers in the steps since the last row."""

    num_images: float = 0.0
    wait_s: float = 0.0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # numerator and denominator of each metric


class StepMetrics:
    """Adds up a step over the workers, and averages the steps between two rows of the history, which ``record`` gets.

    ``samples_seen`` are the used images of the run so far.
    """

    def __init__(self, worker: Worker, record: Callable[[MetricRow], None], samples_seen: int) -> None:
        self.samples_seen = samples_seen
        self._worker = worker
        self._record = record
        # Gloo ends a process that gets a sum of another size, such as one of batch norm, if workers are out of step.
        self._group = own_group(worker.device) if worker.world_size > 1 and worker.device.type == "cpu" else None
        # What travels with the next step: sums of numerators and of denominators, (2, room), in the order of the names.
        self._names: tuple[str, ...] = ()
        self._logged = torch.zeros(2, _ROOM, dtype=torch.float64, device=worker.device)
        self._denominators: dict[str, float] = {}  # what the host knows of them; the device has the rest
        # What travels now: this worker's totals, the sums on the device, and those that the host has not read.
        self._own = StepTotals()
        self._sums = torch.zeros(0, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._unread = deque[_Sums]()
        # The row that the next steps add to, and one that lacks only what was logged in its last step.
        self._row = _OpenRow()
        self._closed_row: MetricRow | None = None
        self._since = time.perf_counter()

    def log(self, values: Mapping[str, tuple[Tensor | float, Tensor | float]], *, counts: bool) -> None:
        """Add ``values`` to the metrics that travel with the next step: of each name a numerator and its denominator.

        All workers log the same names. Without ``counts``, nothing but the names is added. The host waits only for a
        tensor that is on another device than the worker's.
        """
        # Names keep their columns for good, so that the sums of several steps have the same.
        new = tuple(name for name in values if name not in self._names)
        for name in new:
            if name in (*OWN_COLUMNS, _SECOND_RATE):
                raise UsageError(
                    f"run.log({name}=...) would replace what the metrics history has as {name} already; give it "
                    "another name."
                )
        self._names += new
        while len(self._names) > self._logged.shape[1]:
            self._logged = torch.cat([self._logged, torch.zeros_like(self._logged[:, :_ROOM])], dim=1)
        if not counts or not values:
            return

        # Most are means, whose weights the host knows: few calls for the device.
        device = self._worker.device
        of_means = [
            number
            for number, weight in values.values()
            if isinstance(number, Tensor) and number.is_floating_point() and not isinstance(weight, Tensor)
        ]
        if len(of_means) == len(values) and tuple(values) == self._names:
            on_device = [number.detach().to(device) for number in of_means]
            self._logged[0, : len(values)] += torch.stack(
                [each.reshape(()) if each.ndim else each for each in on_device]
            )
            for name, (_, weight) in values.items():
                self._denominators[name] = self._denominators.get(name, 0.0) + float(weight)
            return
        numbers = [
            number.detach().to(device, torch.float64).reshape(())
            if isinstance(number, Tensor)
            else torch.full((), float(number), dtype=torch.float64, device=device)
            for pair in values.values()
            for number in pair
        ]  # float64 () each
        columns = torch.stack(numbers).view(-1, 2).T  # (2, number of values)
        if tuple(values) == self._names:
            self._logged[:, : len(values)] += columns
        else:
            self._logged[:, [self._names.index(name) for name in values]] += columns

    def start(self, own: StepTotals) -> None:
        """Send this worker's totals of a step, and numerators and denominators of the metrics that it logged before."""
        self._own, self._work, denominators = own, None, self._denominators
        self._sums, self._logged, self._denominators = self._logged.flatten(), torch.zeros_like(self._logged), {}
        if self._worker.world_size > 1:
            counts = self._counts(own, denominators)
            counts[_FIRST_METRIC:] += self._sums
            self._sums = counts
            self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)
        self._unread.append(_Sums(self._names, denominators, *copy_to_host(self._sums, self._work)))

    def num_used(self) -> Tensor:
        """Return the number of used images in the step's global batch of several workers, float64 () on the device."""
        if self._work is not None:
            self._work.wait()
        return self._sums[0]

    def read(self) -> StepTotals:
        """Return the totals of a step. If a row ended with the step before, record it, now that all of it is known."""
        num_late = 1 if self._worker.world_size == 1 and self._closed_row is None else 0
        totals = self._own
        while len(self._unread) > num_late:
            sent = self._unread.popleft()
            if self._work is not None:
                self._work.wait()
            if sent.copied is not None:
                sent.copied.synchronize()
            totals = self._add_to_row(sent)
        if self._closed_row is not None:
            means = {name: numerator / denominator for name, (numerator, denominator) in self._row.sums.items()}
            self._record(dataclasses.replace(self._closed_row, metrics={**self._closed_row.metrics, **means}))
            self._closed_row, self._row = None, _OpenRow()

        # The counts are those of this step.
        self._row.num_images += totals.num_used
        self._row.wait_s += totals.wait_s
        self.samples_seen += int(totals.num_used)
        return totals

    def _add_to_row(self, sent: _Sums) -> StepTotals:
        """Add to the row the metrics of the step before that of ``sent``. Return the totals of the latter."""
        sums, totals, known = sent.numbers.tolist(), self._own, sent.denominators
        if self._worker.world_size > 1:
            totals, sums, known = self._totals(sums), sums[_FIRST_METRIC:], {}
        middle = len(sums) // 2
        for name, numerator, on_device in zip(sent.names, sums[:middle], sums[middle:], strict=False):
            if denominator := on_device + known.get(name, 0.0):
                before = self._row.sums.get(name, (0.0, 0.0))
                self._row.sums[name] = before[0] + numerator, before[1] + denominator
        return totals

    def close_row(self, step: int, epoch: int, learning_rates: Sequence[float | Tensor]) -> None:
        """End the row with ``step`` of ``epoch``, both counted from 1. Only the metrics of that step are missing.

        The history keeps the first of ``learning_rates``, and as a metric the first that is another one.
        """
        rates = [float(rate) for rate in learning_rates]
        other_rates = [rate for rate in rates if rate != rates[0]]
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        self._since = now
        self._closed_row = MetricRow(
            kind="step",
            step=step,
            epoch=epoch,
            samples_seen=self.samples_seen,
            learning_rate=rates[0] if rates else 0.0,
            images_per_s=round(self._row.num_images / seconds, 1),
            data_wait_fraction=round(min(self._row.wait_s / self._worker.world_size / seconds, 1.0), 4),
            metrics={_SECOND_RATE: other_rates[0]} if other_rates else {},
        )

    def exclude(self, seconds: float) -> None:
        """Subtract the ``seconds`` of an evaluation from the time of the row."""
        self._since += seconds

    def flush(self, own: StepTotals) -> StepTotals:
        """Reduce the metrics of the last step, which would otherwise travel with the next one."""
        self.start(own)
        return self.read()

    def joined(self, own: StepTotals) -> StepTotals:
        """Return the sum of all workers' ``own`` totals, beside those of the step. Every worker calls this."""
        if self._worker.world_size == 1:
            return own
        sums = self._counts(own, {})  # of the size of a step's
        dist.all_reduce(sums, group=self._group)
        return self._totals(sums.tolist())

    def _counts(self, own: StepTotals, denominators: Mapping[str, float]) -> Tensor:
        """Return the host's numbers of this worker on the device: its totals, a digest of the names, and denominators.

        There is room for a numerator of each name, and for its denominator.
        """
        room = self._logged.shape[1]
        known = [denominators.get(name, 0.0) for name in self._names]
        metrics = [0.0] * room + known + [0.0] * (room - len(known))
        counts = torch.tensor([*vars(own).values(), *digest_of(self._names), *metrics], dtype=torch.float64)
        return counts.to(self._worker.device, non_blocking=True)

    def _totals(self, sums: list[float]) -> StepTotals:
        """Return the totals in all workers' ``sums``. Raises UsageError, on all of them, if their names differ."""
        if not digests_agree(sums[_NUM_TOTALS:_FIRST_METRIC], self._worker.world_size):
            raise UsageError(
                f"The workers log different names (worker {self._worker.rank}: {', '.join(self._names) or 'none'}); "
                "call run.log with the same names on every worker: a metric is the mean over the images of all of them."
            )
        return StepTotals(*sums[:_NUM_TOTALS])


def copy_to_host(sums: Tensor, work: dist.Work | None) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return the ``sums`` on the host, valid once ``work`` has ended; on a GPU, a copy that is whole after the event.

    The copy of several workers' sums has a stream of its own, so that the GPU goes on before the other workers come.
    """
    if not sums.is_cuda:
        return sums, None
    stream = torch.cuda.current_stream(sums.device) if work is None else _stream(sums.device)
    host = torch.empty(len(sums), dtype=sums.dtype, pin_memory=True)
    copied = torch.cuda.Event()
    with torch.cuda.stream(stream):
        if work is not None:
            work.wait()
            sums.record_stream(stream)  # otherwise later sums could be written over them
        host.copy_(sums, non_blocking=True)
        copied.record()
    return host, copied
