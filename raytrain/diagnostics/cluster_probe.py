"""Probe all nodes of the connected cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass

from raytrain.backends.ray.on_each_node import ClusterNode, run_on_each_node
from raytrain.diagnostics.node_probe import NodeReport, ProbeRequest, probe_node

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Node(ClusterNode):
    """A node of the cluster and what it reported. Without a report, ``error`` is a sentence that says why."""

    report: NodeReport | None = None
    error: str | None = None
    clock_ahead_s: float = 0.0
    """By how much the node's clock is ahead of this machine's, at least; below 0 if it is behind."""


def probe_nodes(request: ProbeRequest) -> tuple[Node, ...]:
    """Probe all nodes at the same time: a broken node delays no other, and training reads on all nodes at once too."""
    asked = time.time()
    results = run_on_each_node(lambda node: probe_node(request, node), _TIMEOUT_S)
    answered = time.time()
    return tuple(
        Node(
            **vars(each.node),
            report=each.result,
            error=each.error,
            clock_ahead_s=_clock_ahead(each.result, asked, answered) if each.result else 0.0,
        )
        for each in results
    )


def _clock_ahead(report: NodeReport, asked: float, answered: float) -> float:
    """The check took place between two moments of this machine's clock: the least that explains a node's clock."""
    started, ended = report.clock_s
    return min(0.0, started - asked) + max(0.0, ended - answered)
