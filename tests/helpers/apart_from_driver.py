"""A run whose loop writes files by relative paths and into the run's folder, on a cluster started in another folder.

``python -m tests.helpers.apart_from_driver IMAGES STORAGE FOLDER CPUS…`` starts a node with each number of CPUs in the
present folder, and in ``FOLDER`` a run on the first of them. It prints the notes of the run as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from ray.cluster_utils import Cluster

import raytrain
from raytrain.monitor.events import Note
from raytrain.monitor.snapshot import Snapshot
from tests.helpers.small_runs import config


def writing(run: raytrain.Run) -> None:
    Path(f"relative-{run.rank}.txt").write_text("x")
    (run.folder / f"kept-{run.rank}.txt").write_text("x")
    for epoch in run.epochs(evaluate=dict):
        for _ in epoch:
            pass


def main(images: str, storage: str, folder: str, *cpus: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(cpus[0]), "include_dashboard": False})
    for count in cpus[1:]:
        cluster.add_node(num_cpus=int(count))
    os.chdir(folder)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    notes: list[str] = []

    def note(snapshot: Snapshot) -> None:
        notes.extend(timed.event.text for timed in snapshot.events if isinstance(timed.event, Note))

    try:
        raytrain.train(config(images, storage, workers=2, epochs=1), loop=writing, view=note)
        print(json.dumps(sorted(set(notes))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
