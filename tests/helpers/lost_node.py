"""Train on a cluster that loses the node of its workers in mid-checkpoint and gets another; print the summary as JSON.

``python -m tests.helpers.lost_node IMAGES STORAGE``, with an S3 server in the environment, in which STORAGE is.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler

os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from ray.cluster_utils import Cluster

import raytrain
from raytrain.monitor.snapshot import Snapshot
from tests.helpers.faulty_runs import Ballast, whole_steps
from tests.helpers.faulty_s3 import faulty_s3
from tests.helpers.small_runs import config, loop_with

_PART = "step-000000010.pt?partNumber=2"


def heavy_loop(run: raytrain.Run) -> None:
    """Train with checkpoints that are uploaded in parts."""
    run.prepare(Ballast())
    loop_with(run)


class NodeLoss:
    """Replaces the node of the workers while the second part of a checkpoint is on its way."""

    def __init__(self, cluster: Cluster, storage: str) -> None:
        self._cluster, self._storage = cluster, storage
        self._node = cluster.add_node(num_cpus=2)
        self._once, self._uploading, self._lost = threading.Lock(), threading.Event(), threading.Event()
        self.whole_steps: list[int] = []

    def interfere(self, request: BaseHTTPRequestHandler, body: bytes) -> str | None:
        """Hold up the request for the second part until the node is lost."""
        if request.command != "PUT" or _PART not in request.path or not self._once.acquire(blocking=False):
            return None
        self._uploading.set()
        self._lost.wait()
        return "reset"

    def look(self, snapshot: Snapshot) -> None:
        """A view of the run, because Ray adds nodes in the main thread alone."""
        if self._uploading.is_set() and not self._lost.is_set():
            self._cluster.remove_node(self._node, allow_graceful=False)
            self.whole_steps = whole_steps(self._storage)
            self._cluster.add_node(num_cpus=2)
            self._lost.set()


def main(images: str, storage: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    loss = NodeLoss(cluster, storage)
    with faulty_s3(os.environ["AWS_ENDPOINT_URL"], interfere=loss.interfere) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        result = raytrain.train(config(images, storage, trace=True), loop=heavy_loop, view=loss.look)
        ray.shutdown()
    cluster.shutdown()
    print(
        json.dumps({**result.summary(), "lost_at": loss.whole_steps})
    )  # not before: Ray prints its complaints to standard output, too


if __name__ == "__main__":
    main(*sys.argv[1:])
