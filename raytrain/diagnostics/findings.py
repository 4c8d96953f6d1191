"""The doctor's findings: one sentence for each problem, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from raytrain.backends.placement import Hardware, Placement
from raytrain.diagnostics.cluster_probe import Node
from raytrain.storage.base import Store

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


def node_failures(node: Node) -> Iterator[str]:
    """What prevents training on a node."""
    if node.report is None:
        assert node.error is not None
        yield node.error
        return
    yield from node.report.problems
    if node.gpus >= 1 and not node.report.gpus:
        yield (
            f"The NVIDIA driver reports no GPU, but Ray counts {node.gpus:g}; check the driver, and that a container "
            "runs with --gpus all."
        )


def node_warnings(node: Node, driver_versions: Versions) -> Iterator[str]:
    """What is unusual on a node, compared with Ray's count and the driver's versions."""
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
    for name, version in node.report.versions.items():
        if version != driver_versions[name]:
            here = driver_versions[name] or "missing"
            yield f"{name} is {version or 'missing'} on the node but {here} here; install the same version."


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
    if storage.settings is not None or num_nodes == 1:
        return None
    return (
        f"{storage.url} is a folder; make sure that all {num_nodes} nodes share it, or use s3://bucket/prefix as "
        "--storage."
    )


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun if number == 1 else noun + 's'}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
