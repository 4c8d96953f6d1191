"""A run on two nodes, of which the second sees another folder of images or of runs.

``python -m tests.helpers.unshared_cluster IMAGES STORAGE HIDDEN`` prints what was refused as JSON. The second
node's raylet runs in a mount namespace with an empty disk over HIDDEN, which is one of the two.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from ray.cluster_utils import Cluster

import raytrain
from tests.helpers.ray_head import RAY
from tests.helpers.small_runs import config


def start_node(address: str, hidden: str) -> subprocess.Popen[bytes]:
    script = f'mount -t tmpfs none "$0" && exec "$@" start --address {address} --num-cpus 1 --block'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, hidden, *RAY]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(images: str, storage: str, hidden: str) -> None:
    Path(storage).mkdir(exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    node = start_node(str(cluster.address), hidden)
    try:
        while len([each for each in ray.nodes() if each["Alive"]]) < 2:
            assert node.poll() is None, "the second node did not start"
            ray.wait([ray.put(0)], timeout=0.2)
        refused = ""
        try:
            raytrain.train(config(images, storage, workers=2))
        except raytrain.UsageError as error:
            refused = str(error)
        print(json.dumps({"refused": refused, "left": [str(found) for found in Path(storage).rglob("*.*")]}))
    finally:
        node.terminate()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
