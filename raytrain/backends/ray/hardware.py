"""What the nodes of the connected cluster have."""

from __future__ import annotations

from typing import Any

from raytrain.backends.placement import Hardware


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
    )
