"""What a worker reads, compared with the batches that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import Partition, WorkerOrder


def assert_reads_only_its_local_batches(
    plan: BatchPlan, loads: Sequence[float], rows_per_block: int, data: st.DataObject
) -> None:
    """A worker that starts at any step reads the samples of its local batches, in their order, and no others."""
    rank = data.draw(st.integers(0, len(loads) - 1))
    first_step = data.draw(st.integers(0, plan.num_steps - 1))
    partition = Partition(plan, rank, loads)
    order = WorkerOrder(partition, first_step, rows_per_block)
    read = np.concatenate([np.empty(0, np.int64), *(order.draws(number) for number in range(len(order)))])
    wanted = [partition.local_draws(plan.batch(step)) for step in range(first_step, plan.num_steps)]
    assert read.tolist() == np.concatenate(wanted).tolist()
