"""Runs a function on every node, such as the check that all see the same storage folder."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raytrain.errors import UsageError
from raytrain.storage.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class ClusterNode:
    """A node and its resources as Ray counts them. ``id`` is the beginning of Ray's node ID."""

    address: str
    id: str
    cpus: float
    gpus: float
    memory_bytes: int
    object_store_bytes: int


@dataclass(frozen=True)
class NodeResult(Generic[T]):
    """What a function returned on a node. If it returned nothing, ``error`` is a sentence that says why."""

    node: ClusterNode
    result: T | None = None
    error: str | None = None


def run_on_each_node(function: Callable[[ClusterNode], T], timeout_s: float) -> tuple[NodeResult[T], ...]:
    """Call ``function`` on all nodes at once, also on busy ones; an error instead of a result after ``timeout_s``."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def call(node: ClusterNode) -> T:  # Ray takes functions only, not everything that can be called
        return function(node)

    # Without CPUs, so that nodes that are fully in use answer too; without retries, so that a failure is reported.
    task: Any = ray.remote(num_cpus=0, max_retries=0)(call)
    started: list[tuple[ClusterNode, Any]] = []
    for found in (each for each in ray.nodes() if each["Alive"]):
        node, there = _node(found), NodeAffinitySchedulingStrategy(found["NodeID"], soft=False)
        started.append((node, task.options(scheduling_strategy=there).remote(node)))
    ray.wait([ref for _, ref in started], num_returns=len(started), timeout=timeout_s)
    return tuple(_collect(node, ref, timeout_s) for node, ref in started)


def _node(node: dict[str, Any]) -> ClusterNode:
    resources = node["Resources"]
    return ClusterNode(
        address=node["NodeManagerAddress"],
        id=node["NodeID"][:8],
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_bytes=int(resources.get("memory", 0)),
        object_store_bytes=int(resources.get("object_store_memory", 0)),
    )


def _collect(node: ClusterNode, ref: Any, timeout_s: float) -> NodeResult[Any]:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return NodeResult(node, result=ray.get(ref, timeout=0))
    except GetTimeoutError:
        ray.cancel(ref, force=True)
        reason = f"The node did not answer within {timeout_s:g} s"
        return NodeResult(node, error=f"{reason}; check whether it is overloaded, or restart Ray there.")
    except Exception as error:
        return NodeResult(node, error=_explain(error))


def _explain(error: Exception) -> str:
    if missing := re.search(r"No module named '(\w+)", str(error)):
        return f"The node's Python has no {missing[1]}; install raytrain in the Python environment that runs Ray there."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"The node could not answer ({lines[-1].rstrip('.')}); check the node, or restart Ray there."


_ANSWER_WITHIN_S = 60.0  # a node may have to start a process first
_VISIBLE_WITHIN_S = 5.0  # a network disk may show a new file late


def check_shared(store: Store, storage: str, num_nodes: int) -> None:
    """Raise UsageError if ``store``, the user's ``storage``, is a folder that a node of several does not see."""
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
