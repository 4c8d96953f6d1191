"""Probe all nodes of the connected cluster."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.backends.ray.on_each_node import ClusterNode, run_on_each_node
from raytrain.diagnostics.node_probe import NodeReport, ProbeRequest, probe_node

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Node(ClusterNode):
    """A node of the cluster and what it reported. Without a report, ``error`` is a sentence that says why."""

    report: NodeReport | None = None
    error: str | None = None


def probe_nodes(request: ProbeRequest) -> tuple[Node, ...]:
    """Probe all nodes at the same time: a broken node delays no other, and training reads on all nodes at once too."""
    results = run_on_each_node(lambda node: probe_node(request, node.gpus), _TIMEOUT_S)
    return tuple(Node(**vars(each.node), report=each.result, error=each.error) for each in results)
