"""Whether a run used each sample exactly once an epoch: what its workers noted, held against its plan."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.manifest import Manifest
from raytrain.data.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.runs import records
from raytrain.runs.history import SKIPPED, read_lines
from raytrain.runs.layout import MANIFEST, TRACE
from raytrain.storage.base import Store


def audit(run: str, *, storage: str = "./runs") -> dict[str, Any]:
    """Hold the trace of a run (made with ``--trace``) against its plan.

    Returns:
        run, first_step and last_step (those traced), epochs and clean. Each of the epochs has epoch, planned (samples that the
        traced steps should have used), used_once, unreadable (listed in skipped.jsonl), and the keys that were missing (planned,
        readable and never used), doubled (used more than once) and misplaced (used in another step than planned). The run is
        clean where there are none of these.

    Raises:
        UsageError: there is no such run, or it left no trace.
    """
    store = records.open_run(storage, run)
    steps, samples = _trace(store)
    if not len(steps):
        raise UsageError(f"Run {run!r} left no trace; train with --trace to keep which samples each step used.")
    manifest = Manifest.from_parquet(store.get(MANIFEST))
    plan = _plan(records.read_config(store), manifest)
    skipped = {row["key"] for row in read_lines(store, SKIPPED)}
    unreadable = np.isin(manifest.keys.to_numpy(zero_copy_only=False).astype(str), list(skipped))
    first, last = int(steps.min()), int(steps.max())
    epochs = [_epoch(plan, manifest, unreadable, steps, samples, *bounds) for bounds in _epochs(plan, first, last)]
    clean = not any(epoch[fault] for epoch in epochs for fault in ("missing", "doubled", "misplaced"))
    return {"run": run, "first_step": first, "last_step": last, "epochs": epochs, "clean": clean}


def _trace(store: Store) -> tuple[Int64s, Int64s]:
    """Steps (counted from 1) and samples of all workers, row by row."""
    files = store.get_many([found.path for found in store.list(TRACE)])
    for file in files:
        if isinstance(file, Exception):
            raise file
    tables = [pyarrow.parquet.read_table(io.BytesIO(file)) for file in files if isinstance(file, bytes)]
    table = pa.concat_tables(tables) if tables else pa.table({"step": pa.array([], pa.int64()), "sample": pa.array([], pa.int64())})
    return table["step"].to_numpy(), table["sample"].to_numpy()


def _plan(config: TrainConfig, manifest: Manifest) -> BatchPlan:
    assert config.batch_size is not None, "a run keeps its resolved options"
    return BatchPlan(
        len(manifest),
        config.batch_size,
        config.epochs,
        config.seed,
        max_steps=config.max_steps,
        shard_shuffle=manifest.shard_shuffle,
    )


def _epochs(plan: BatchPlan, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The traced steps, counted from 1, epoch by epoch: first and last of each."""
    while first <= last:
        end = min(last, (plan.batch(first - 1).epoch + 1) * plan.steps_per_epoch)
        yield first, end
        first = end + 1


def _epoch(
    plan: BatchPlan, manifest: Manifest, unreadable: npt.NDArray[np.bool_], steps: Int64s, samples: Int64s, first: int, last: int
) -> dict[str, Any]:
    """What became of the samples of the steps ``first`` to ``last``, which are of one epoch."""
    planned_step = np.zeros(plan.num_samples, np.int64)  # 0: in none of these steps
    for step in range(first, last + 1):
        planned_step[plan.batch_samples(plan.batch(step - 1))] = step
    here = (steps >= first) & (steps <= last)
    used = np.bincount(samples[here], minlength=plan.num_samples)
    misplaced = samples[here][planned_step[samples[here]] != steps[here]]

    def keys(chosen: Any) -> list[str]:
        return manifest.keys.take(pa.array(np.unique(chosen))).to_pylist()

    return {
        "epoch": plan.batch(first - 1).epoch + 1,
        "planned": int((planned_step > 0).sum()),
        "used_once": int((used == 1).sum()),
        "unreadable": int(((planned_step > 0) & unreadable & (used == 0)).sum()),
        "missing": keys(np.flatnonzero((planned_step > 0) & (used == 0) & ~unreadable)),
        "doubled": keys(np.flatnonzero(used > 1)),
        "misplaced": keys(misplaced),
    }
