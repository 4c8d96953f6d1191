"""Checks that all nodes see the same storage folder: a checkpoint in a folder of one node is lost with that node."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable

from raytrain.backends.ray.on_each_node import ClusterNode, NodeResult, run_on_each_node
from raytrain.errors import UsageError
from raytrain.storage.base import Store

_ANSWER_WITHIN_S = 60.0  # a node may have to start a process first
_VISIBLE_WITHIN_S = 5.0  # a network disk may show a new file late


def check_shared(store: Store, storage: str, num_nodes: int) -> None:
    """Raise UsageError if the run's ``store`` is a folder that a node of the connected cluster does not see.

    ``storage`` is the option as the user gave it. One node alone, and S3, need no check.
    """
    if store.cloud is not None or num_nodes < 2:
        return
    probe = f".node-check-{uuid.uuid4().hex}"
    store.put(probe, b"")
    try:
        file = os.path.join(store.url, probe)
        refuse_unshared(storage, run_on_each_node(lambda node: _sees(node, file), _ANSWER_WITHIN_S))
    finally:
        store.delete(probe)


def refuse_unshared(storage: str, results: Iterable[NodeResult[bool]]) -> None:
    """Raise UsageError with the first node that does not see the folder ``storage``, or did not answer."""
    for found in results:
        if found.error is not None:
            raise UsageError(
                f"--storage is the folder {storage}, and the node {found.node.address} did not say whether it sees it: "
                f"{found.error}"
            )
        if not found.result:
            raise UsageError(
                f"--storage is the folder {storage}, which the node {found.node.address} ({found.node.id}) does not "
                "share with this machine, so that the checkpoints would be lost with that node; use s3://bucket/prefix "
                "or a folder that all nodes share."
            )


def _sees(node: ClusterNode, file: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not os.path.exists(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
