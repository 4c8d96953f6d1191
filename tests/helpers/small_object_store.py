"""Train with each cache setting on a cluster with a small object store, and print the summaries as JSON.

``python -m tests.helpers.small_object_store BYTES IMAGES STORAGE``
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
from ray._private.internal_api import memory_summary
from ray.cluster_utils import Cluster

import raytrain
from tests.helpers.small_runs import config

SIDE = 640
"""Height and width of the decoded images: 90 of them take 111 MB."""


def options(images: Path | str, storage: Path | str, **more: Any) -> raytrain.TrainConfig:
    return config(
        images,
        storage,
        model="tests.helpers.small_object_store:network",
        image_size=(SIDE, SIDE),
        precision="float32",
        trace=True,
        **more,
    )


def network(num_classes: int, channels: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.AvgPool2d(SIDE // 10), nn.Flatten(), nn.Linear(channels * 100, num_classes))


def main(num_bytes: str, images: str, storage: str) -> None:
    small = {"num_cpus": 2, "object_store_memory": int(num_bytes), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    results: dict[str, Any] = {}
    for cache in ("none", "auto", "memory"):
        try:
            results[cache] = raytrain.train(options(images, storage, name=cache, cache=cache)).summary()
        except raytrain.UsageError as error:
            results[cache] = {"status": "refused", "error": str(error)}
        spilled = re.search(r"Spilled (\d+) MiB", memory_summary(cluster.address, stats_only=True))
        results[cache]["spilled_mib"] = int(spilled[1]) if spilled else 0  # Since the start of the cluster.
    ray.shutdown()
    cluster.shutdown()
    # Not before: Ray prints its complaints to standard output, too.
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
