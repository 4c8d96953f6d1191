"""Train on a cluster whose second node is drained with notice, and print the summary and events as JSON.

``python -m tests.helpers.draining_cluster IMAGES STORAGE``
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")

import threading

import ray
from ray.cluster_utils import Cluster
from ray.train.v2._internal.execution.context import get_train_context

import raytrain
from raytrain.display.event_text import event_text
from tests.helpers.ray_head import RAY
from tests.helpers.small_runs import config, loop_with
from tests.helpers.waiting import wait_for


def hold(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    """With two workers, wait in step 7 for the preemption notice and in step 9 for the removal of the node."""
    if run.world_size == 2 and batch.step == 6:
        (folder / "announce").touch()
        wait_for(lambda: get_train_context().preemption_context.preemption_info is not None)
    if run.world_size == 2 and batch.step == 8:
        (folder / "remove").touch()
        threading.Event().wait()  # Ray ends this worker group.


def announce(cluster: Cluster, node: Any) -> None:
    why = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "taken back",
        "--deadline-remaining-seconds",
        "600",
    ]
    subprocess.run(
        [*RAY, "drain-node", "--address", str(cluster.address), "--node-id", str(node.node_id), *why],
        check=True,
        capture_output=True,
    )


def main(images: str, storage: str) -> None:
    folder = Path(storage)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    nodes = [cluster.add_node(num_cpus=1)]
    cluster.wait_for_nodes()
    announced: list[Any] = []
    events: dict[int, str] = {}

    def look(snapshot: Any) -> None:
        events.update({number: event_text(event) for number, _, event in snapshot.events})
        if (folder / "announce").exists() and not announced:
            announced.append(nodes[0])
            announce(cluster, nodes[0])
        if (
            (folder / "remove").exists()
            and nodes
            and (folder / "run" / "checkpoints" / "step-000000008.pt.json").exists()
        ):
            cluster.remove_node(nodes.pop(), allow_graceful=False)

    options = config(images, storage, workers="1..2", trace=True, checkpoint_every=())
    loop = partial(loop_with, before_step=partial(hold, folder=folder))  # pyright: ignore
    result = raytrain.train(options, loop=loop, view=look)
    ray.shutdown()
    cluster.shutdown()
    print(
        json.dumps({**result.summary(), "events": list(events.values())})
    )  # not before: Ray prints its complaints to standard output, too


if __name__ == "__main__":
    main(*sys.argv[1:])
