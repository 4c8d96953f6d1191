"""The nodes of a cluster: CPUs, GPUs, object stores, what suits all of them, and functions that run on each."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from raytrain.config.network import Precision, Resizer
from raytrain.data.images.resize import fastest_resizer
from raytrain.errors import UsageError
from raytrain.launch.placement import Hardware, fastest_precision
from raytrain.launch.ray.private_api import object_store_use
from raytrain.runs.background import Background, Throttle
from raytrain.runs.machine_history import MEASURE_EVERY_S, MachineUse
from raytrain.storage.store import Store

T = TypeVar("T")

_ANSWER_WITHIN_S = 60.0  # a node may have to start a process first


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


_GPU_TYPE = "accelerator_type:"  # Ray's resource that stands for a type of GPU begins with this


def cluster_hardware() -> Hardware:
    """What the connected cluster has."""
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    resources = [node["Resources"] for node in nodes]
    return Hardware(
        num_nodes=len(nodes),
        cpus=sum(each.get("CPU", 0.0) for each in resources),
        gpus=sum(each.get("GPU", 0.0) for each in resources),
        object_store_bytes=int(min(each.get("object_store_memory", 0.0) for each in resources)),
        gpu_types=_gpu_types(resources),
    )


def _gpu_types(resources: list[dict[str, float]]) -> dict[str, float]:
    """How many GPUs there are of each type. Ray marks a node with its type by a resource of that name."""
    found: Counter[str] = Counter()
    for each in resources:
        for name in each:
            if name.startswith(_GPU_TYPE):
                found[name.removeprefix(_GPU_TYPE)] += int(each.get("GPU", 0.0))
    return dict(found)


def worker_resources(device: str, cpus: float, accelerator_type: str | None) -> dict[str, float]:
    """What a worker asks Ray for."""
    if device == "cpu":
        return {"CPU": cpus}
    # A thousandth, as Ray itself asks for: the mark of a node is 1, for however many GPUs.
    marked = {} if accelerator_type is None else {f"{_GPU_TYPE}{accelerator_type}": 0.001}
    return {"CPU": cpus, "GPU": 1.0, **marked}


def fastest_on_nodes(device: str) -> Precision:
    """The fastest precision that trains well on all nodes of the connected cluster that have such a device."""
    nodes = run_on_each_node(lambda node: fastest_precision(device), _ANSWER_WITHIN_S)
    found = {each.result for each in nodes if device == "cpu" or each.node.gpus >= 1}  # None: a node did not say
    return "bfloat16" if found == {"bfloat16"} else "float32"


def fastest_resizer_on_nodes() -> Resizer:
    """The fastest library for resizing images that all nodes of the connected cluster have."""
    found = {each.result for each in run_on_each_node(lambda node: fastest_resizer(), _ANSWER_WITHIN_S)}
    return "cykooz" if found == {"cykooz"} else "pillow"


_HEAD_ANSWERS_WITHIN_S = 10.0


class ObjectStores:
    """Asks the head every few seconds, for all nodes at once and without waiting for it."""

    def __init__(self) -> None:
        self._ask = Background(object_store_use)  # a question takes long if nobody answers
        self._throttle = Throttle()
        self._uses: dict[str, tuple[int, int]] = {}

    def add_to(self, use: MachineUse, node_id: str) -> MachineUse:
        """``use`` with what the object store of its node holds, as of the last question; unknown without an answer."""
        from ray.exceptions import RayError

        if self._throttle.due("ask", MEASURE_EVERY_S):
            self._uses = {}
            with suppress(RayError):
                self._uses = self._ask(_HEAD_ANSWERS_WITHIN_S) or {}
        if node_id not in self._uses:
            return use
        used, total = self._uses[node_id]
        return replace(use, object_store_bytes=used, object_store_total_bytes=total)
