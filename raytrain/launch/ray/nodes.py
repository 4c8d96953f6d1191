"""The nodes of a cluster: runs functions on each, sums up their hardware, and finds what all of them support."""

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
from raytrain.data.images.crop_box import fastest_resizer
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.launch.placement import Hardware, fastest_precision
from raytrain.launch.ray.head_queries import object_store_use
from raytrain.loader.machine import gpu_decoder_problem
from raytrain.runs.background_and_throttle import Background, Throttle
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
    """Result of a function on a node. If it failed, ``result`` is None, and ``error`` says why and what to do.

    ``missing_module`` is the module that the node's Python lacks, if that is why.
    """

    node: ClusterNode
    result: T | None = None
    error: str | None = None
    missing_module: str = ""


def run_on_each_node(function: Callable[[ClusterNode], T], timeout_s: float) -> tuple[NodeResult[T], ...]:
    """Call ``function`` on all nodes at once, also on busy ones; return the result or the error of each.

    A node that takes over ``timeout_s``, or on which ``function`` raises an exception, gives an error. Dead nodes are
    left out.

    Example: ``run_on_each_node(lambda node: os.cpu_count(), timeout_s=10.0)``
    """
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def call(node: ClusterNode) -> T:  # Ray takes functions only, no other callables
        return function(node)

    # The task asks for no CPUs, so that busy nodes answer, too, and has no retries, so that a failure is reported.
    task: Any = ray.remote(num_cpus=0, max_retries=0)(call)
    calls: list[tuple[ClusterNode, Any]] = []
    for record in (record for record in ray.nodes() if record["Alive"]):
        resources: dict[str, float] = record["Resources"]
        node = ClusterNode(
            address=record["NodeManagerAddress"],
            id=record["NodeID"][:8],
            cpus=resources.get("CPU", 0.0),
            gpus=resources.get("GPU", 0.0),
            memory_bytes=int(resources.get("memory", 0)),
            object_store_bytes=int(resources.get("object_store_memory", 0)),
        )
        strategy = NodeAffinitySchedulingStrategy(record["NodeID"], soft=False)
        calls.append((node, task.options(scheduling_strategy=strategy).remote(node)))

    # Wait for all nodes together, and make a sentence of each failure.
    ray.wait([ref for _, ref in calls], num_returns=len(calls), timeout=timeout_s)
    results: list[NodeResult[T]] = []
    for node, ref in calls:
        try:
            results.append(NodeResult(node, result=ray.get(ref, timeout=0)))
        except GetTimeoutError:
            ray.cancel(ref, force=True)
            sentence = (
                f"The node did not answer within {timeout_s:g} s; check whether it is overloaded, or restart Ray there."
            )
            results.append(NodeResult(node, error=sentence))
        except Exception as error:
            # The last line of the error, which follows a traceback, says why.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            sentence = f"The node could not answer ({lines[-1].rstrip('.')}); check the node, or restart Ray there."
            missing = re.search(r"No module named '(\w+)", str(error))
            module = missing[1] if missing else ""
            if module:
                advice = "install raytrain in the Python environment that runs Ray there"
                sentence = f"The node's Python has no {module}; {advice}."
            results.append(NodeResult(node, error=sentence, missing_module=module))
    return tuple(results)


_VISIBLE_WITHIN_S = 5.0  # a network disk may show a new file late


def check_shared(store: Store, storage: str, num_nodes: int) -> None:
    """Raise UsageError if ``store``, the user's ``storage``, is a folder that not all nodes share with this machine.

    All nodes look for a file that is written there for a moment. A bucket, or a single node, needs no check.
    """
    if store.cloud is not None or num_nodes < 2:
        return
    probe = f".node-check-{uuid.uuid4().hex}"
    file = os.path.join(store.url, probe)

    def sees_probe(node: ClusterNode) -> bool:
        deadline = time.monotonic() + _VISIBLE_WITHIN_S
        while not os.path.exists(file):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    store.put(probe, b"")
    try:
        refuse_unshared(storage, run_on_each_node(sees_probe, _ANSWER_WITHIN_S))
    finally:
        store.delete(probe)


def refuse_unshared(storage: str, results: Iterable[NodeResult[bool]]) -> None:
    """Raise UsageError with the first node that does not see the folder ``storage``, or did not answer."""
    for answer in results:
        if answer.error is not None:
            raise UsageError(
                f"--storage is the folder {storage}, and the node {answer.node.address} did not say whether it sees "
                f"it: {answer.error}"
            )
        if not answer.result:
            raise UsageError(
                f"--storage is the folder {storage}, which the node {answer.node.address} ({answer.node.id}) does not "
                "share with this machine, so that the checkpoints would be lost with that node; use s3://bucket/prefix "
                "or a folder that all nodes share."
            )


def check_readers(parts: Iterable[tuple[Store, Manifest]]) -> None:
    """Raise UsageError if some node has no raytrain, or not the images of ``parts``, which may be read on any node.

    Of images in folders, each node looks for the first file of each part: a copy of the folder in the same place has
    it, too. A node without CPUs reads no images, and one that does not answer may do so later.
    """
    import ray

    if sum(record["Alive"] for record in ray.nodes()) < 2:
        return
    files: list[tuple[Store, str]] = []
    for store, images in parts:
        if store.cloud is None and len(images):
            first = images.packing.shards[0] if images.packing else images.keys_of([0])[0]
            if store.exists(first):  # otherwise it has been deleted since, which is no reason to refuse a node
                files.append((store, first))

    def folder_without_images(node: ClusterNode) -> str:
        return next((store.url for store, path in files if not store.exists(path)), "")

    refuse_readers(run_on_each_node(folder_without_images, _ANSWER_WITHIN_S))


def refuse_readers(results: Iterable[NodeResult[str]]) -> None:
    """Raise UsageError with the first node that lacks a module or a folder, which is its result, to read images."""
    for answer in results:
        node = answer.node
        if node.cpus and answer.missing_module:
            raise UsageError(f"The node {node.address} ({node.id}) can neither read images nor train: {answer.error}")
        if node.cpus and answer.result:
            raise UsageError(
                f"The images are in the folder {answer.result}, and the node {node.address} ({node.id}) does not have "
                "them there; use s3://bucket/prefix, a folder that all nodes share, or a copy in the same place."
            )


_GPU_TYPE = "accelerator_type:"  # a node with GPUs has a resource of this name with the type at its end


def cluster_hardware() -> Hardware:
    """Return the hardware of the connected cluster: CPUs, GPUs by type, and room in its smallest object store."""
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    resources_of_nodes: list[dict[str, float]] = [node["Resources"] for node in nodes]
    gpu_types: Counter[str] = Counter()
    for resources in resources_of_nodes:
        for name in resources:
            if name.startswith(_GPU_TYPE):
                gpu_types[name.removeprefix(_GPU_TYPE)] += int(resources.get("GPU", 0.0))
    return Hardware(
        num_nodes=len(nodes),
        cpus=sum(resources.get("CPU", 0.0) for resources in resources_of_nodes),
        gpus=sum(resources.get("GPU", 0.0) for resources in resources_of_nodes),
        object_store_bytes=int(min(resources.get("object_store_memory", 0.0) for resources in resources_of_nodes)),
        gpu_types=dict(gpu_types),
    )


def worker_resources(device: str, cpus: float, accelerator_type: str | None) -> dict[str, float]:
    """Return a worker's request to Ray: ``{"CPU": 2.0, "GPU": 1.0}`` for a worker on a GPU of any type."""
    if device == "cpu":
        return {"CPU": cpus}
    # A node has 1 of the resource for its type, however many GPUs it has, so a worker asks for a thousandth of it, as
    # Ray itself does for an accelerator_type.
    gpu_type = {} if accelerator_type is None else {f"{_GPU_TYPE}{accelerator_type}": 0.001}
    return {"CPU": cpus, "GPU": 1.0, **gpu_type}


def fastest_on_nodes(device: str) -> Precision:
    """Return the fastest precision that trains well on all nodes of the cluster that have such a device.

    A node that does not answer counts as one that only supports float32.
    """
    answers = run_on_each_node(lambda node: fastest_precision(device), _ANSWER_WITHIN_S)
    precisions = {answer.result for answer in answers if device == "cpu" or answer.node.gpus >= 1}
    return "bfloat16" if precisions == {"bfloat16"} else "float32"


def fastest_resizer_on_nodes() -> Resizer:
    """Return the fastest library for resizing images that all nodes of the connected cluster have.

    A node that does not answer counts as one that has only Pillow, which all have.
    """
    answers = run_on_each_node(lambda node: fastest_resizer(), _ANSWER_WITHIN_S)
    return "cykooz" if {answer.result for answer in answers} == {"cykooz"} else "pillow"


def decoder_problem_on_nodes(device: str) -> str | None:
    """Return why ``device`` of some node cannot decode JPEGs, with the node's address; None if all nodes can.

    Nodes without a GPU are left out. For another device than ``cuda``, no node is asked.
    """
    if device != "cuda":
        return gpu_decoder_problem(device)
    for answer in run_on_each_node(lambda node: gpu_decoder_problem(device), _ANSWER_WITHIN_S):
        if answer.node.gpus >= 1 and answer.error is not None:
            return f"the node {answer.node.address} did not say whether its GPUs can ({answer.error.rstrip('.')})"
        if answer.node.gpus >= 1 and answer.result is not None:
            return f"on the node {answer.node.address} {answer.result}"
    return None


_HEAD_ANSWERS_WITHIN_S = 10.0


class ObjectStores:
    """Use of the object stores of all nodes: asks the head every few seconds, without waiting for its answer."""

    def __init__(self) -> None:
        self._ask = Background(object_store_use)  # in a thread, since a silent head takes long
        self._throttle = Throttle()
        self._uses: dict[str, tuple[int, int]] = {}

    def add_to(self, use: MachineUse, node_id: str) -> MachineUse:
        """Return ``use`` with the use of the object store of the node ``node_id``, by the head's last answer.

        It is returned unchanged if that is not known: the head has not answered, or has not named the node.
        """
        from ray.exceptions import RayError

        if self._throttle.due("ask", MEASURE_EVERY_S):
            self._uses = {}
            with suppress(RayError):
                self._uses = self._ask(_HEAD_ANSWERS_WITHIN_S) or {}
        if node_id not in self._uses:
            return use
        used, total = self._uses[node_id]
        return replace(use, object_store_bytes=used, object_store_total_bytes=total)
