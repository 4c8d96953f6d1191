"""Trace of the samples that a worker used in each step (``--trace``), for ``raytrain audit``."""

from __future__ import annotations

import io
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from raytrain.data.plan.permutation import Int64s
from raytrain.runs.documents import TRACE
from raytrain.storage.store import Store

_LAST_STEP = re.compile(r"-(\d{9})-\d{5}\.parquet$")  # in the name of a file: FIRST-LAST-RANK.parquet


class SampleTrace:
    """Writes rows of step (counted from 1) and sample (index into the manifest), a file per worker and checkpoint.

    A file is written before the checkpoint that completes its steps. Files of steps after the newest checkpoint belong
    to steps that a failure has undone; worker 0 deletes them when the run resumes after ``first_step`` steps.

    Example::

        trace = SampleTrace(store, rank=0, first_step=0)
        trace.add(1, np.array([17, 4]))
        trace.write()
    """

    def __init__(self, store: Store, rank: int, first_step: int) -> None:
        self._store = store
        self._rank = rank
        self._steps: list[tuple[int, Int64s]] = []
        if rank == 0:
            for file in list(store.list(TRACE)):
                if (last := _LAST_STEP.search(file.path)) and int(last[1]) > first_step:
                    store.delete(file.path)

    def add(self, step: int, samples: Int64s) -> None:
        """Note that this worker used ``samples``, indices into the manifest, in ``step`` (counted from 1)."""
        self._steps.append((step, samples))

    def write(self) -> None:
        """Write a file of the steps since the last call; none if there were none."""
        if not self._steps:
            return
        steps = np.repeat([step for step, _ in self._steps], [len(samples) for _, samples in self._steps])
        table = pa.table({"step": steps, "sample": np.concatenate([samples for _, samples in self._steps])})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer)
        first, last = self._steps[0][0], self._steps[-1][0]
        self._store.put(f"{TRACE}{first:09d}-{last:09d}-{self._rank:05d}.parquet", buffer.getvalue())
        self._steps.clear()
