"""A node that lacks nothing, and its report."""

from __future__ import annotations

from raytrain.diagnostics import node_probe
from raytrain.diagnostics.network_probe import Interface
from raytrain.diagnostics.node_probe import Disk, NodeReport
from raytrain.launch.ray.nodes import ClusterNode

HERE = ClusterNode("127.0.0.1", "0" * 8, 8, 0, 10**9, 10**9)
HEALTHY = NodeReport(
    node_probe.versions(),
    (),
    None,
    None,
    read_speed=None,
    writable=True,
    problems=(),
    precision="bfloat16",
    interface=Interface("eth0", 10**10),
    disk=Disk(10**12, 2 * 10**12),
    clock_s=(0.0, 0.0),
)
