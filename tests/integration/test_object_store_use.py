"""The head of a cluster says how full the object store of each node is."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from raytrain.launch.ray.head_queries import object_store_use

NUM_BYTES = 5_000_000


@pytest.mark.usefixtures("ray_cluster")
def test_what_is_put_into_the_object_store_of_a_node_counts_there() -> None:
    node = ray.get_runtime_context().get_node_id()
    before, total = object_store_use(timeout_s=10.0)[node]
    kept = ray.put(np.zeros(NUM_BYTES, np.uint8))
    used = before
    while used < before + NUM_BYTES:  # the node tells the head several times a second
        used, total = object_store_use(timeout_s=10.0)[node]
    assert used < total
    del kept
