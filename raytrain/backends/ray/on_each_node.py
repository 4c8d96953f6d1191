"""Run a function on every node of the connected Ray cluster. Ray is imported when it is used, not with this module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
    """Call ``function`` on all nodes at the same time, also on nodes whose CPUs are all in use.

    A node that fails or takes longer than ``timeout_s`` in all has an error instead of a result; nothing is raised.
    """
    import ray

    def call(node: ClusterNode) -> T:  # Ray takes functions only, not everything that can be called
        return function(node)

    # Without CPUs, so that nodes that are fully in use answer too; without retries, so that a failure is reported.
    task: Any = ray.remote(num_cpus=0, max_retries=0)(call)
    started = [(node, _start(task, node, node_id)) for node, node_id in _live_nodes()]
    ray.wait([ref for _, ref in started], num_returns=len(started), timeout=timeout_s)
    return tuple(_collect(node, ref, timeout_s) for node, ref in started)


def _live_nodes() -> list[tuple[ClusterNode, str]]:
    """The nodes that are alive, each with its complete ID."""
    import ray

    return [(_node(node), node["NodeID"]) for node in ray.nodes() if node["Alive"]]


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


def _start(task: Any, node: ClusterNode, node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(node)


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
