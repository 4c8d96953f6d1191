"""The CPUs and GPUs of every node of a cluster, by the numbers that ``--device`` takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from raytrain.diagnostics.node_probe import Node, ProbeRequest, probe_nodes
from raytrain.launch.placement import Gpu
from raytrain.launch.ray.connection import connection


@dataclass(frozen=True)
class NodeDevices:
    """A node's devices. A GPU's number is its index in ``gpus``; ``problems`` are sentences that say what to do."""

    address: str
    id: str
    cpus: float
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """The same as plain values, each GPU with its number."""
        gpus = [{"number": number, **dataclasses.asdict(gpu)} for number, gpu in enumerate(self.gpus)]
        return {**dataclasses.asdict(self), "gpus": gpus, "problems": list(self.problems)}


@dataclass(frozen=True)
class Devices:
    """The devices of all nodes of a cluster."""

    nodes: tuple[NodeDevices, ...]

    def summary(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"nodes": [node.summary() for node in self.nodes]}


def list_devices(address: str | None) -> Devices:
    """List the devices of every node of the cluster at ``address``. Raises UsageError if there is no cluster."""
    with connection(address) as cluster:
        cluster.connect()
        nodes = probe_nodes(ProbeRequest())
    return Devices(tuple(node_devices(node) for node in nodes))


def node_devices(node: Node) -> NodeDevices:
    """The devices of a node that was probed."""
    return NodeDevices(
        address=node.address,
        id=node.id,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
        gpus=node.report.gpus if node.report else (),
        problems=node.report.problems if node.report else (node.error or "",),
    )
