"""Sums each step's counts and metrics over the workers in one small all-reduce, and makes the rows of the history.

The path of a metric: :func:`logged_fractions` makes a numerator and a denominator of each value that a loop logs, and
:meth:`StepMetrics.log` adds them to ``_logged``. At the next step, :meth:`~StepMetrics.start` sums them over the
workers. :meth:`~StepMetrics.read` adds these sums to those of the steps since the last row, and records the row, in
which each metric is the quotient of its sums.

The all-reduce of a step starts before its forward, and gives the backward the number of used images. Its sums are
copied to the host at once, so that a GPU never waits for the host to read them:

- Several workers read the sums when the step ends, because all of them must stop after the same step. The host, which
  has queued the whole step by then, waits until the GPU begins it.
- A single worker knows its own counts. It reads what was logged a step late, or at once if a row of the history waits.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.errors import UsageError
from raytrain.runs.metric_row import OWN_COLUMNS, MetricRow
from raytrain.training.exact.agreement import digest_of, digests_agree
from raytrain.training.exact.gradients import own_group
from raytrain.training.metrics.prepared_metrics import is_metric, joined_values
from raytrain.training.protocols import Worker

_MOST_NUMBERS = 200  # of a vector: each is a metric of its own
Fraction = tuple[Tensor | float, Tensor | float]
"""This worker's numerator and denominator.

A metric is the sum of all workers' numerators, divided by the sum of their denominators.
"""

_SECOND_RATE = "second_learning_rate"
_stream = cache(torch.cuda.Stream)  # one for each GPU, on which sums are copied to the host


@dataclass(frozen=True)
class StepTotals:
    """Counts of a step that are summed together with its metrics: of one worker, or of all workers, added up."""

    num_used: float = 0  # images that can be used
    wait_s: float = 0.0  # seconds of waiting for the local batch
    stop_requests: float = 0
    checkpoint_requests: float = 0
    loops_returned: float = 0  # before the end of the run
    evaluations: float = 0  # evaluations that begin
    totals: float = 0  # calls of run.total
    means: float = 0  # calls of run.mean
    gathers: float = 0  # calls of run.gather
    prepares: float = 0  # calls of run.prepare with a network
    optimizer_steps: float = 0  # 1 if an optimizer has stepped in the batch before
    digest: float = 0  # of the shapes in a call, which must be the same on all workers
    digest_squared: float = 0

    def check_together(self, num_workers: int, step: int) -> None:
        """Raise UsageError if only some of ``num_workers`` workers made one of ``_CALLS`` after ``step`` steps.

        These are the totals of all workers.
        """
        for call, sentence in _CALLS.items():
            number: float = getattr(self, call)
            if 0 < number < num_workers:
                raise UsageError(
                    f"After step {step:,} the loop {sentence} on {number:.0f} of {num_workers} workers and continued "
                    "on the others; every worker must take the same steps: decide by what all of them know, such as "
                    "run.total(...)."
                )


_CALLS = {  # the field of StepTotals that counts a call: what the loop did, in a sentence
    "loops_returned": "returned",
    "optimizer_steps": "had stepped an optimizer in its last batch",
    "evaluations": "called run.evaluate()",
    "totals": "called run.total",
    "means": "called run.mean",
    "gathers": "called run.gather",
    "prepares": "called run.prepare",
}
_NUM_TOTALS = len(dataclasses.fields(StepTotals))
_FIRST_METRIC = _NUM_TOTALS + 2  # its position in what is sent: after the totals, and the names' digest and its square
_ROOM = 32  # for names: all workers send tensors of this size, even if one of them logs a name that the others do not


@dataclass(frozen=True)
class _Sums:
    """The sums of one step, on their way to the host: of the metrics that were logged before it."""

    names: tuple[str, ...]  # of these metrics
    host_denominators: Mapping[str, float]  # the part of the denominators that this worker's host has summed itself
    numbers: Tensor  # float64 (n,), on the host: numerators, then denominators; for several workers, totals come first
    copied: torch.cuda.Event | None  # after which the numbers are valid; None if they were computed on the host


@dataclass
class _OpenRow:
    """Counts and metrics of all workers in the steps since the last row."""

    num_images: float = 0.0
    wait_s: float = 0.0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # numerator and denominator of each metric


def logged_fractions(
    values: Mapping[str, Any], num_used: int, classes: Sequence[str], world_size: int
) -> dict[str, Fraction]:
    """Return the fraction of each metric in ``values``, which a loop logs for ``num_used`` images of this worker.

    The numbers of a vector are named after ``classes`` if it has one for each class, otherwise by their positions.
    Every worker calls this, because objects of ``torchmetrics`` are joined over the workers. Raises UsageError for a
    value that ``Run.log`` does not take.

    Example: ``logged_fractions({"loss": 0.5}, num_used=8, classes=[], world_size=1) == {"loss": (4.0, 8)}``
    """
    fractions: dict[str, Fraction] = {}
    for name, value in values.items():
        # A value that is not a mean over the images is given as two sums.
        if isinstance(value, tuple):
            pair: tuple[Any, ...] = value
            if len(pair) != 2 or not all(map(_is_number, pair)):
                raise UsageError(
                    f"run.log({name}=...) got a tuple of {len(pair)}; give (numerator, denominator), two numbers of "
                    "this worker's images, or one number, the mean over them."
                )
            fractions_of_value: dict[str, Fraction] = {name: (_detached(pair[0]), _detached(pair[1]))}
        # A metric object's value is over all workers' images already. Any other mean is weighted by the images.
        elif is_metric(value):
            members = joined_values(value, world_size)
            named = [_named_numbers(member or name, measured, classes) for member, measured in members.items()]
            fractions_of_value = {key: (number, 1) for numbers in named for key, number in numbers.items()}
        else:
            numbers = _named_numbers(name, value, classes)
            fractions_of_value = {key: (number * num_used, num_used) for key, number in numbers.items()}

        if taken := fractions.keys() & fractions_of_value.keys():
            raise UsageError(
                f"run.log got {min(taken)} twice, the second time in {name}=...; give each another name, those of a "
                'collection by its prefix, as in MetricCollection(..., prefix="train ").'
            )
        fractions |= fractions_of_value
    return fractions


def _named_numbers(name: str, value: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of ``value``, which is logged as ``name``, by the names of their metrics."""
    if _is_number(value):
        return {name: _detached(value)}
    if isinstance(value, Tensor) and value.ndim == 1 and len(value) <= _MOST_NUMBERS:
        suffixes = classes if len(value) == len(classes) else range(len(value))
        return {f"{name} {suffix}": number for suffix, number in zip(suffixes, _detached(value), strict=True)}
    if isinstance(value, Mapping):  # of a wrapper such as ClasswiseWrapper
        parts: Mapping[Any, Any] = value
        named = [_named_numbers(f"{name} {key}", part, classes) for key, part in parts.items()]
        return {key: number for numbers in named for key, number in numbers.items()}
    shape = f" of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise UsageError(
        f"run.log({name}=...) got a {type(value).__name__}{shape}; give one number, the mean over this worker's "
        f"images of the batch, (numerator, denominator), a vector of at most {_MOST_NUMBERS} numbers, or an object of "
        "torchmetrics."
    )


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a number or a tensor with a single one."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _detached(value: Any) -> Any:
    """Return ``value`` as a number, or a tensor without a graph.

    The tensor has at least 32 bits, because its product with a number of images may not fit into fewer.
    """
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach() if value.element_size() >= 4 else value.detach().float()


class StepMetrics:
    """Adds up a step's counts and metrics over the workers, and makes the rows of the history, which ``record`` gets.

    The metrics of a row are means over the steps since the row before. ``samples_seen`` is the number of images that
    the run has used so far.
    """

    def __init__(self, worker: Worker, record: Callable[[MetricRow], None], samples_seen: int) -> None:
        self.samples_seen = samples_seen
        self._worker = worker
        self._record = record
        # A group of its own: if workers are out of step, Gloo would end a process that gets a sum of another size, such
        # as one of batch norm.
        self._group = own_group(worker.device) if worker.world_size > 1 and worker.device.type == "cpu" else None
        # To be sent with the next step: sums of numerators and of denominators, (2, room), in the order of the names.
        self._names: tuple[str, ...] = ()
        self._logged = torch.zeros(2, _ROOM, dtype=torch.float64, device=worker.device)
        # The part of the denominators that the host knows, by name; the rest of them is in _logged, on the device.
        self._host_denominators: dict[str, float] = {}
        # Sent with the current step: this worker's totals, and the sums on the device. After these, the sums of this
        # step and earlier ones that the host has not read.
        self._own_totals = StepTotals()
        self._sums = torch.zeros(0, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._unread = deque[_Sums]()
        # The row to which the next steps add, and a row that lacks only the metrics of its last step.
        self._row = _OpenRow()
        self._closed_row: MetricRow | None = None
        self._since = time.perf_counter()  # when the open row began, moved on by the seconds of evaluations

    def log(self, values: Mapping[str, Fraction], *, counts: bool) -> None:
        """Add ``values``, a numerator and a denominator by name, to the metrics that are sent with the next step.

        All workers log the same names. Without ``counts``, as for a placeholder, only the names are noted. The host
        waits only for a tensor that is on another device than the worker's. Raises UsageError for a name that the
        history has already.
        """
        # Names keep their columns for the rest of the run, so that the sums of several steps can be added.
        new = tuple(name for name in values if name not in self._names)
        for name in new:
            if name in (*OWN_COLUMNS, _SECOND_RATE):
                raise UsageError(
                    f"run.log({name}=...) would replace what the metrics history has as {name} already; give it "
                    "another name."
                )
        self._names += new
        # Make room for further names, by columns of zeros: as many on every worker, since all log the same names.
        while len(self._names) > self._logged.shape[1]:
            self._logged = torch.cat([self._logged, torch.zeros_like(self._logged[:, :_ROOM])], dim=1)
        if not counts or not values:
            return

        # Usually a loop logs the same names each time, and all values are means whose weights the host knows. Then one
        # addition on the device, of all numerators, is enough.
        device = self._worker.device
        numerators = [
            numerator
            for numerator, denominator in values.values()
            if isinstance(numerator, Tensor) and numerator.is_floating_point() and not isinstance(denominator, Tensor)
        ]
        if len(numerators) == len(values) and tuple(values) == self._names:
            numerators_on_device = [numerator.detach().to(device) for numerator in numerators]
            scalars = [numerator.reshape(()) if numerator.ndim else numerator for numerator in numerators_on_device]
            self._logged[0, : len(values)].add_(torch.stack(scalars))  # +=, on a part, would copy it onto itself, too
            for name, (_, denominator) in values.items():
                self._host_denominators[name] = self._host_denominators.get(name, 0.0) + float(denominator)
            return

        # Otherwise bring both numbers of each value to the device, and add them in the columns of their names.
        numbers = [
            number.detach().to(device, torch.float64).reshape(())
            if isinstance(number, Tensor)
            else torch.full((), float(number), dtype=torch.float64, device=device)
            for pair in values.values()
            for number in pair
        ]  # float64 () each
        columns = torch.stack(numbers).view(-1, 2).T  # (2, number of values)
        if tuple(values) == self._names:
            self._logged[:, : len(values)].add_(columns)
        else:
            self._logged[:, [self._names.index(name) for name in values]] += columns

    def start(self, own_totals: StepTotals) -> None:
        """Start the all-reduce of a step: of this worker's ``own_totals``, and of the metrics that it logged before.

        The next metrics are added up anew. A single worker sends nothing, and only copies its metrics to the host.
        """
        self._own_totals, self._work = own_totals, None
        host_denominators, self._host_denominators = self._host_denominators, {}
        self._sums, self._logged = self._logged.flatten(), torch.zeros_like(self._logged)
        if self._worker.world_size > 1:
            counts = self._counts(own_totals, host_denominators)
            counts[_FIRST_METRIC:] += self._sums
            self._sums = counts
            self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)
        self._unread.append(_Sums(self._names, host_denominators, *copy_to_host(self._sums, self._work)))

    def num_used(self) -> Tensor:
        """Return the number of used images in the step's global batch, float64 () on the device.

        Only several workers may call this: a single one does not send its counts to the device.
        """
        if self._work is not None:
            self._work.wait()
        return self._sums[0]

    def read(self) -> StepTotals:
        """Return the totals of a step. If a row ended with the step before, record it, as it is complete now.

        Raises UsageError on all workers if they have logged different names.
        """
        # A single worker leaves the newest sums unread until the next step, so that it waits for nothing; only a row
        # that is to be recorded needs them now.
        num_late = 1 if self._worker.world_size == 1 and self._closed_row is None else 0
        totals = self._own_totals
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
        """Add the metrics in ``sent``, which the step before has logged, to the row.

        Return the totals that were sent with them; a single worker sends none, and has its own.
        """
        sums, totals, host_denominators = sent.numbers.tolist(), self._own_totals, sent.host_denominators
        if self._worker.world_size > 1:
            # The hosts' parts of the denominators were sent, too, so they are in the sums already.
            totals, sums, host_denominators = self._totals(sums), sums[_FIRST_METRIC:], {}
        middle = len(sums) // 2
        numerators, denominators = sums[:middle], sums[middle:]  # longer than the names, which do not fill all columns
        for name, numerator, denominator in zip(sent.names, numerators, denominators, strict=False):
            whole_denominator = denominator + host_denominators.get(name, 0.0)
            if whole_denominator:  # otherwise the name was not logged in this step
                before = self._row.sums.get(name, (0.0, 0.0))
                self._row.sums[name] = before[0] + numerator, before[1] + whole_denominator
        return totals

    def close_row(self, step: int, epoch: int, learning_rates: Sequence[float | Tensor]) -> None:
        """End the row with ``step`` of ``epoch``, both counted from 1. The next :meth:`read` adds its metrics.

        The row has the first of ``learning_rates``, and, as a metric, the first one that differs from it. There are
        none if no optimizer has stepped since the last row.
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
            learning_rate=rates[0] if rates else None,
            images_per_s=round(self._row.num_images / seconds, 1),
            data_wait_fraction=round(min(self._row.wait_s / self._worker.world_size / seconds, 1.0), 4),
            metrics={_SECOND_RATE: other_rates[0]} if other_rates else {},
        )

    def exclude(self, seconds: float) -> None:
        """Subtract the ``seconds`` of an evaluation from the time of the row."""
        self._since += seconds

    def flush(self, own_totals: StepTotals) -> StepTotals:
        """Sum the metrics of the last step over the workers now, instead of with the next step.

        Record the row that ends with that step, if there is one, and return the sum of all workers' ``own_totals``.
        """
        self.start(own_totals)
        return self.read()

    def joined(self, own_totals: StepTotals) -> StepTotals:
        """Return the sum of all workers' ``own_totals`` at once, beside the all-reduce of the step.

        Every worker calls this. Raises UsageError on all workers if they have logged different names.
        """
        if self._worker.world_size == 1:
            return own_totals
        sums = self._counts(own_totals, {})  # of the same size as in a step
        dist.all_reduce(sums, group=self._group)
        return self._totals(sums.tolist())

    def check_all(self, call: str, shapes: object, step: int) -> None:
        """Raise UsageError if not all workers make this ``call``, a field of StepTotals, with the same ``shapes``.

        All workers wait for each other here. ``step`` is the number of steps after which the loop makes the call.
        """
        num_workers = self._worker.world_size
        if num_workers == 1:
            return
        digest, squared = digest_of(shapes)
        totals = self.joined(StepTotals(digest=digest, digest_squared=squared, **{call: 1}))
        totals.check_together(num_workers, step)
        if not digests_agree((totals.digest, totals.digest_squared), num_workers):
            raise UsageError(
                f"After step {step:,} the loop {_CALLS[call]} with other shapes on worker {self._worker.rank} than on "
                f"another: {shapes!s:.80}; every worker must give the same."
            )

    def _counts(self, own_totals: StepTotals, host_denominators: Mapping[str, float]) -> Tensor:
        """Return what this worker's host knows of a step, on the device, in the layout in which it is sent.

        That is: the totals, the digest of the names, zeros in the place of the numerators, and the denominators.
        """
        room = self._logged.shape[1]
        denominators = [host_denominators.get(name, 0.0) for name in self._names]
        metrics = [0.0] * room + denominators + [0.0] * (room - len(denominators))
        counts = torch.tensor([*vars(own_totals).values(), *digest_of(self._names), *metrics], dtype=torch.float64)
        return counts.to(self._worker.device, non_blocking=True)

    def _totals(self, sums: list[float]) -> StepTotals:
        """Return the totals in all workers' ``sums``. Raises UsageError on all workers if their names differ."""
        if not digests_agree(sums[_NUM_TOTALS:_FIRST_METRIC], self._worker.world_size):
            raise UsageError(
                f"The workers log different names (worker {self._worker.rank}: {', '.join(self._names) or 'none'}); "
                "call run.log with the same names on every worker: a metric is the mean over the images of all of them."
            )
        return StepTotals(*sums[:_NUM_TOTALS])


def copy_to_host(sums: Tensor, work: dist.Work | None) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return the ``sums`` on the host, valid once ``work`` has ended; from a GPU, a copy that is valid after the event.

    Sums of several workers are copied on a stream of their own, so that the GPU does not wait for the other workers.
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
