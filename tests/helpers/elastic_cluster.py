"""Train on a cluster whose second node joins and leaves, and print the summary as JSON.

``python -m tests.helpers.elastic_cluster IMAGES STORAGE``
"""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")

import threading

import ray
from ray.cluster_utils import Cluster

import raytrain
from raytrain.launch.ray import trainer
from tests.helpers.small_runs import config, loop_with


def hold(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    """With one worker, wait in step 7 until the second node joins; with two, wait in step 14 until it leaves."""
    if (run.world_size, batch.step) == (1, 6) and not (folder / "two").exists():
        (folder / "add").touch()
        threading.Event().wait()  # Ray ends this worker group.
    if (run.world_size, batch.step) == (2, 6):
        (folder / "two").touch()
    if (run.world_size, batch.step) == (2, 13):
        (folder / "remove").touch()
        threading.Event().wait()


def main(images: str, storage: str) -> None:
    folder = Path(storage)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    nodes: list[Any] = []
    workers: list[int] = []

    def look(snapshot: Any) -> None:
        workers.append(snapshot.num_workers)
        if (folder / "add").exists() and not nodes:
            nodes.append(cluster.add_node(num_cpus=1))
        if (folder / "remove").exists() and len(nodes) == 1:
            nodes.append(None)
            cluster.remove_node(nodes[0], allow_graceful=False)

    # A real run looks for more room every 30 s, and this one waits for two looks.
    trainer._RESIZE_EVERY_S = 3.0
    options = config(images, storage, workers="1..2", trace=True, checkpoint_every=("1ep", "2st"), max_failures=5)
    loop = partial(loop_with, before_step=partial(hold, folder=folder))  # pyright: ignore
    result = raytrain.train(options, loop=loop, view=look)
    numbers = [number for number, before in zip(workers, [None, *workers], strict=False) if number != before]
    ray.shutdown()
    cluster.shutdown()
    print(
        json.dumps({**result.summary(), "num_workers_seen": numbers})
    )  # not before: Ray prints its complaints to standard output, too


if __name__ == "__main__":
    main(*sys.argv[1:])
