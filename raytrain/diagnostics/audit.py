"""``raytrain audit``: compares a run's trace with its batch plan."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.config.option_values import Location
from raytrain.data.dataset import training_plan
from raytrain.data.labels.manifest import Manifest
from raytrain.data.parquet_size import read_columns
from raytrain.data.plan.batch_plan import BatchPlan, samples_of
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import StorageError, UsageError
from raytrain.runs.documents import MANIFEST, TRACE, open_single_run, read_resolved_config
from raytrain.runs.metrics_history import read_skipped
from raytrain.storage.store import Store


@dataclass(frozen=True)
class EpochAudit:
    """Samples that the traced steps of one epoch used as planned or otherwise. ``epoch`` is counted from 1."""

    epoch: int
    planned: int  # draws in these steps by the plan: one per sample, or more with balanced sampling
    used_once: int  # draws of samples that were used as often as planned
    unreadable: int  # draws of samples that were not used, and that skipped.jsonl lists
    missing: tuple[str, ...]  # keys of readable samples that were used less often than planned
    doubled: tuple[str, ...]  # keys of samples that were used more often than planned
    misplaced: tuple[str, ...]  # keys of samples that were used in another step than planned

    @property
    def clean(self) -> bool:
        """True if each readable sample was used exactly once, in its step."""
        return not (self.missing or self.doubled or self.misplaced)


@dataclass(frozen=True)
class AuditResult:
    """Result of :func:`audit` for the steps that have a trace, ``first_step`` to ``last_step``."""

    run: str
    first_step: int
    last_step: int
    epochs: tuple[EpochAudit, ...]

    @property
    def clean(self) -> bool:
        """True if each readable sample was used exactly once per epoch, in its step."""
        return all(epoch.clean for epoch in self.epochs)

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**asdict(self), "clean": self.clean}


def audit(run: str, *, storage: Location = "./runs") -> AuditResult:
    """Compare the trace of a run that was trained with ``--trace`` with the run's batch plan.

    Raises UsageError if there is no such run, or it has no trace or no list of its images, and StorageError if its
    documents cannot be read.

    Example: ``raytrain.audit("first").clean``
    """
    store = open_single_run(os.fspath(storage), run)
    steps, samples = _read_trace(store, run)
    try:
        manifest = Manifest.from_parquet(store.get(MANIFEST))
    except FileNotFoundError:
        raise UsageError(f"Run {run!r} has no list of its images, with which its trace could be compared.") from None
    keys = manifest.keys.to_numpy(zero_copy_only=False).astype(str)
    unreadable = np.isin(keys, [image.key for image in read_skipped(store)])  # (num_samples,)
    plan = training_plan(read_resolved_config(store), manifest)

    # Compare epoch by epoch, as far as there is a trace: it may begin or end within an epoch.
    first_step, last_step = int(steps.min()), int(steps.max())
    epochs: list[EpochAudit] = []
    first = first_step
    while first <= last_step:
        last = min(last_step, (plan.batch(first - 1).epoch + 1) * plan.steps_per_epoch)
        traced = (steps >= first) & (steps <= last)
        epochs.append(_audit_epoch(plan, manifest, unreadable, (first, last), steps[traced], samples[traced]))
        first = last + 1
    return AuditResult(run, first_step, last_step, tuple(epochs))


def _read_trace(store: Store, run: str) -> tuple[Int64s, Int64s]:
    """Return the steps, counted from 1, and the samples that all workers used in them, both (num_uses,)."""
    tables: list[pa.Table] = []
    for content in store.get_many([stored.path for stored in store.list(TRACE)]):
        if isinstance(content, Exception):
            raise content
        try:
            columns = read_columns(content, ["step", "sample"])
            tables.append(columns.select(["step", "sample"]))  # raises KeyError if one of them is missing
        except (ValueError, OSError, KeyError) as error:
            raise StorageError(f"The trace of run {run!r} is damaged ({error}); it cannot be audited.") from None
    if not tables:
        raise UsageError(f"Run {run!r} has no trace; train with --trace to record which samples each step uses.")
    table = pa.concat_tables(tables)
    return table["step"].to_numpy(), table["sample"].to_numpy()


def _audit_epoch(
    plan: BatchPlan,
    manifest: Manifest,
    unreadable: npt.NDArray[np.bool_],
    first_and_last: tuple[int, int],
    used_in: Int64s,
    used: Int64s,
) -> EpochAudit:
    """Compare the steps from the first to the last, counted from 1, of one epoch with the plan.

    The sample ``used[i]`` was used in step ``used_in[i]``.
    """
    # The planned samples, and the steps in which they should be used.
    first, last = first_and_last
    draws = [plan.batch_draws(plan.batch(step - 1)) for step in range(first, last + 1)]
    planned_in = np.repeat(np.arange(first, last + 1), [len(batch) for batch in draws])
    planned = samples_of(np.concatenate(draws), plan.num_samples)

    # Compare how often each sample was used, and in which steps. A pair of step and sample is encoded as one number,
    # step * num_samples + sample.
    times_planned = np.bincount(planned, minlength=plan.num_samples)  # (num_samples,)
    times_used = np.bincount(used, minlength=plan.num_samples)
    was_skipped = (times_used == 0) & unreadable
    is_as_planned = np.isin(used_in * plan.num_samples + used, planned_in * plan.num_samples + planned)

    def keys_of(samples: npt.NDArray[np.integer]) -> tuple[str, ...]:
        """Return the key of each of the samples once, in the order of the manifest."""
        return tuple(manifest.keys.take(pa.array(np.unique(samples))).to_pylist())

    return EpochAudit(
        epoch=plan.batch(first - 1).epoch + 1,
        planned=len(planned),
        used_once=int(times_used[times_used == times_planned].sum()),
        unreadable=int(times_planned[was_skipped].sum()),
        missing=keys_of(np.flatnonzero((times_used < times_planned) & ~was_skipped)),
        doubled=keys_of(np.flatnonzero(times_used > times_planned)),
        misplaced=keys_of(used[~is_as_planned]),
    )
