"""``raytrain audit``: compares a run's trace with its batch plan."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from raytrain.config.values import Location
from raytrain.data.dataset import training_plan
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.runs.documents import MANIFEST, TRACE, open_run, read_resolved_config
from raytrain.runs.history import read_skipped
from raytrain.storage.store import Store


@dataclass(frozen=True)
class EpochAudit:
    """How the samples of the traced steps of one epoch were used. ``epoch`` is counted from 1."""

    epoch: int
    planned: int  # samples that these steps should have used; with balanced sampling, each as often as it was drawn
    used_once: int  # those of samples that were used as often as planned
    unreadable: int  # those of samples that skipped.jsonl lists and that were not used
    missing: tuple[str, ...]  # keys of readable samples that were used less often than planned
    doubled: tuple[str, ...]  # keys of samples that were used more often than planned
    misplaced: tuple[str, ...]  # keys of samples that were used in another step than planned

    @property
    def clean(self) -> bool:
        """Whether each readable sample was used exactly once, in its step."""
        return not (self.missing or self.doubled or self.misplaced)


@dataclass(frozen=True)
class AuditResult:
    """What :func:`audit` found in the steps ``first_step`` to ``last_step``, which are those with a trace."""

    run: str
    first_step: int
    last_step: int
    epochs: tuple[EpochAudit, ...]

    @property
    def clean(self) -> bool:
        """Whether each readable sample was used exactly once per epoch, in its step."""
        return all(epoch.clean for epoch in self.epochs)

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        return {**asdict(self), "clean": self.clean}


def audit(run: str, *, storage: Location = "./runs") -> AuditResult:
    """Compare the trace of a run that was trained with ``--trace`` with the run's batch plan.

    Raises:
        UsageError: there is no such run, or it has no trace.
    """
    store = open_run(os.fspath(storage), run)
    steps, samples = _read_trace(store, run)
    manifest = Manifest.from_parquet(store.get(MANIFEST))
    skipped = {image.key for image in read_skipped(store)}
    auditor = _Auditor(steps, samples, training_plan(read_resolved_config(store), manifest), manifest, skipped)
    first, last = int(steps.min()), int(steps.max())
    return AuditResult(run, first, last, tuple(auditor.audit_epochs(first, last)))


def _read_trace(store: Store, run: str) -> tuple[Int64s, Int64s]:
    """The samples that all workers used, one by one, and their steps, counted from 1; raises what storage raises."""
    tables: list[pa.Table] = []
    for content in store.get_many([stored.path for stored in store.list(TRACE)]):
        if isinstance(content, Exception):
            raise content
        tables.append(pyarrow.parquet.read_table(io.BytesIO(content)))
    if not tables:
        raise UsageError(f"Run {run!r} has no trace; train with --trace to record which samples each step uses.")
    table = pa.concat_tables(tables)
    return table["step"].to_numpy(), table["sample"].to_numpy()


class _Auditor:
    """Compares a trace with a plan, epoch by epoch: sample ``samples[i]`` was used in step ``steps[i]``."""

    def __init__(self, steps: Int64s, samples: Int64s, plan: BatchPlan, manifest: Manifest, skipped: set[str]) -> None:
        self._steps, self._samples = steps, samples
        self._plan = plan
        self._keys = manifest.keys
        keys = manifest.keys.to_numpy(zero_copy_only=False).astype(str)
        self._unreadable: npt.NDArray[np.bool_] = np.isin(keys, list(skipped))  # (num_samples,)

    def audit_epochs(self, first: int, last: int) -> Iterator[EpochAudit]:
        """Audit the steps ``first`` to ``last``, counted from 1."""
        while first <= last:
            end = min(last, (self._plan.batch(first - 1).epoch + 1) * self._plan.steps_per_epoch)
            yield self._audit_epoch(first, end)
            first = end + 1

    def _audit_epoch(self, first: int, last: int) -> EpochAudit:
        """Audit the steps ``first`` to ``last`` of one epoch."""
        num_samples = self._plan.num_samples
        planned_steps, planned_samples = self._planned(first, last)
        in_steps = (self._steps >= first) & (self._steps <= last)
        steps, samples = self._steps[in_steps], self._samples[in_steps]
        times_planned = np.bincount(planned_samples, minlength=num_samples)
        times_used = np.bincount(samples, minlength=num_samples)
        lacking = (times_used < times_planned) & ~((times_used == 0) & self._unreadable)
        as_planned = np.isin(steps * num_samples + samples, planned_steps * num_samples + planned_samples)
        return EpochAudit(
            epoch=self._plan.batch(first - 1).epoch + 1,
            planned=len(planned_samples),
            used_once=int(times_used[times_used == np.maximum(times_planned, 1)].sum()),
            unreadable=int(times_planned[(times_used == 0) & self._unreadable].sum()),
            missing=self._keys_of(np.flatnonzero(lacking)),
            doubled=self._keys_of(np.flatnonzero(times_used > np.maximum(times_planned, 1))),
            misplaced=self._keys_of(samples[~as_planned]),
        )

    def _planned(self, first: int, last: int) -> tuple[Int64s, Int64s]:
        """The steps ``first`` to ``last`` and the samples that they should use, one by one, both (n,)."""
        batches = [self._plan.batch_samples(self._plan.batch(step - 1)) for step in range(first, last + 1)]
        steps = np.repeat(np.arange(first, last + 1), [len(batch) for batch in batches])
        return steps, np.concatenate(batches) % self._plan.num_samples

    def _keys_of(self, samples: npt.NDArray[np.integer]) -> tuple[str, ...]:
        return tuple(self._keys.take(pa.array(np.unique(samples))).to_pylist())
