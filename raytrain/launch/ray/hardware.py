"""CPUs, GPUs and object stores of a cluster, and the precision that suits all of it. Imports Ray when it is asked."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raytrain.config.network import Precision, Resizer
from raytrain.data.images.resize import fastest_resizer
from raytrain.launch.placement import Hardware, fastest_precision
from raytrain.launch.ray.on_each_node import run_on_each_node
from raytrain.launch.ray.private_api import object_store_use
from raytrain.runs.background import Background, Throttle
from raytrain.runs.machine_history import MEASURE_EVERY_S, MachineUse

_TIMEOUT_S = 60.0
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
    nodes = run_on_each_node(lambda node: fastest_precision(device), _TIMEOUT_S)
    found = {each.result for each in nodes if device == "cpu" or each.node.gpus >= 1}  # None: a node did not say
    return "bfloat16" if found == {"bfloat16"} else "float32"


def fastest_resizer_on_nodes() -> Resizer:
    """The fastest library for resizing images that all nodes of the connected cluster have."""
    found = {each.result for each in run_on_each_node(lambda node: fastest_resizer(), _TIMEOUT_S)}
    return "cykooz" if found == {"cykooz"} else "pillow"


_ANSWER_WITHIN_S = 10.0


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
                self._uses = self._ask(_ANSWER_WITHIN_S) or {}
        if node_id not in self._uses:
            return use
        used, total = self._uses[node_id]
        return replace(use, object_store_bytes=used, object_store_total_bytes=total)
