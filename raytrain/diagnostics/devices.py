"""The devices of every node of a cluster, by the numbers that ``--gpus`` takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.backends.ray.cluster import connection
from raytrain.diagnostics.doctor import Node, ask
from raytrain.diagnostics.node_probe import Gpu, ProbeRequest
from raytrain.display.doctor_tables import size


@dataclass(frozen=True)
class Devices:
    """What :func:`list_devices` found."""

    nodes: tuple[Node, ...]

    def summary(self) -> dict[str, Any]:
        """The nodes, each with its GPUs and what is wrong with them, as plain values."""
        return {"nodes": [_summary(node) for node in self.nodes]}

    def __rich__(self) -> RenderableType:
        table = Table("node", "device", "name", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("memory", "driver", "capability"):
            table.add_column(heading, justify="right")
        for node in self.nodes:
            table.add_row(f"{node.address} {node.id}", "CPU", f"{node.cpus:g} of them", size(node.memory_bytes), "", "")
            for number, gpu in enumerate(_gpus(node)):
                memory = size(gpu.memory_bytes) if gpu.memory_bytes else "shared"
                table.add_row("", f"GPU {number}", gpu.name, memory, gpu.driver, gpu.capability)
        lines = [Text(f"✗ {node.address}: {problem}", "red") for node in self.nodes for problem in _problems(node)]
        return Group(table, *lines)


def list_devices(address: str | None) -> Devices:
    """Ask every node of the cluster at ``address`` for its devices; raises UsageError where there is no cluster."""
    with connection(address) as cluster:
        cluster.connect()
        return Devices(ask(ProbeRequest(data=None, storage=None, source=None, resolved_by="")))


def _summary(node: Node) -> dict[str, Any]:
    gpus = [{"number": number, **dataclasses.asdict(gpu)} for number, gpu in enumerate(_gpus(node))]
    known = {name: getattr(node, name) for name in ("address", "id", "cpus", "memory_bytes")}
    return {**known, "gpus": gpus, "problems": _problems(node)}


def _gpus(node: Node) -> tuple[Gpu, ...]:
    return node.answer.gpus if node.answer else ()


def _problems(node: Node) -> list[str]:
    return list(node.answer.problems) if node.answer else [node.silence or ""]
