"""The doctor's findings: one sentence for each problem, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from raytrain.backends.placement import Hardware, Placement
from raytrain.diagnostics.cluster_probe import Node
from raytrain.storage.base import Store

_CLOCK_TOLERANCE_S = 5.0  # a sixth of the time after which a run without a heartbeat loses its claim
_SPILLS_BELOW = 0.95  # RAY_local_fs_capacity_threshold's default

Versions = dict[str, str | None]
"""Version of each package; None for one that is not installed."""


class Finding(NamedTuple):
    """A problem, and the addresses of the nodes that have it; no addresses if it is one of the cluster."""

    sentence: str
    nodes: tuple[str, ...] = ()


def group_by_sentence(nodes: Iterable[Node], sentences: Callable[[Node], Iterator[str]]) -> tuple[Finding, ...]:
    """The sentences about all nodes, each once with the addresses of its nodes."""
    addresses: dict[str, list[str]] = {}
    for node in nodes:
        for sentence in sentences(node):
            addresses.setdefault(sentence, []).append(node.address)
    return tuple(Finding(sentence, tuple(found)) for sentence, found in addresses.items())


def node_failures(node: Node, driver_versions: Versions) -> Iterator[str]:
    """What prevents training on a node, or the same numbers on all of them."""
    if node.report is None:
        assert node.error is not None
        yield node.error
        return
    yield from node.report.problems
    for name, version in node.report.versions.items():
        if version != driver_versions[name]:
            here = driver_versions[name] or "missing"
            yield f"{name} is {version or 'missing'} on the node but {here} here; install the same version."
    if node.gpus >= 1 and not node.report.gpus:
        yield (
            f"The NVIDIA driver reports no GPU, but Ray counts {node.gpus:g}; check the driver, and that a container "
            "runs with --gpus all."
        )


def node_warnings(node: Node) -> Iterator[str]:
    """What is unusual on a node, compared with Ray's count and this machine's clock."""
    if node.report is None:
        return
    if node.gpus < (num_gpus := len(node.report.gpus)):
        yield (
            f"Ray counts {node.gpus:g} of the {num_gpus} GPUs that the NVIDIA driver reports; start Ray with "
            f"--num-gpus {num_gpus} to use them all."
        )
    if node.report.shm_bytes is not None and node.report.shm_bytes < node.object_store_bytes:
        yield (
            f"/dev/shm has {_gigabytes(node.report.shm_bytes)} and the object store "
            f"{_gigabytes(node.object_store_bytes)}, so images are written to disk; run the container with --shm-size "
            f"{node.object_store_bytes / 2**30:.0f}g or more."
        )
    if abs(node.clock_ahead_s) > _CLOCK_TOLERANCE_S:
        direction = "ahead of" if node.clock_ahead_s > 0 else "behind"
        yield (
            f"The node's clock is at least {abs(node.clock_ahead_s):.0f} s {direction} this machine's; keep both right "
            "with chrony or another NTP client: heartbeats, leases and S3's signatures count on it."
        )
    if node.report.disk.used_fraction > _SPILLS_BELOW:
        yield (
            f"The disk of the temporary folder is {node.report.disk.used_fraction:.0%} full, and Ray writes images to "
            f"it, if memory is short, only below {_SPILLS_BELOW:.0%}; make room there."
        )


def different_nvidia_drivers(nodes: Iterable[Node]) -> str | None:
    """Whether the nodes' GPUs have different drivers."""
    found = sorted({gpu.driver for node in nodes if node.report for gpu in node.report.gpus})
    if len(found) < 2:
        return None
    return f"The nodes have NVIDIA drivers {', '.join(found)}; install the same one, for NCCL depends on it."


def too_few_data_cpus(hardware: Hardware, placement: Placement | None) -> str | None:
    """Whether reading images will hold up training on GPUs, or leaves no CPU at all."""
    if placement is None:
        return None
    left = placement.data_cpus * placement.num_workers
    needed = placement.num_workers if placement.device == "cuda" else 1
    if left > needed - 0.01:  # fractions of CPUs are rounded down
        return None
    workers = f"{_count(placement.num_workers, 'worker')} on {placement.device}"
    return (
        f"The cluster has {_count(hardware.cpus, 'CPU')}, which leaves {left:.2g} to read images for {workers}, so the "
        "workers will wait for images; add CPUs, or use fewer --workers."
    )


def folder_on_many_nodes(storage: Store, num_nodes: int) -> str | None:
    """Whether runs are written to a folder that some nodes may not see."""
    if storage.cloud is not None or num_nodes == 1:
        return None
    return (
        f"{storage.url} is a folder; make sure that all {num_nodes} nodes share it, or use s3://bucket/prefix as "
        "--storage."
    )


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun if number == 1 else noun + 's'}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
