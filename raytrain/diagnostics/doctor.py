"""`raytrain doctor`: each problem of a machine or cluster as a sentence with what to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raytrain import recipes
from raytrain.diagnostics.network_probe import AllReduce, measure_all_reduce
from raytrain.diagnostics.node_probe import Node, ProbeRequest, probe_nodes, versions
from raytrain.errors import UsageError, format_count
from raytrain.launch.placement import Hardware, Placement, place
from raytrain.launch.ray import private_api
from raytrain.launch.ray.connection import Connection
from raytrain.launch.ray.nodes import cluster_hardware
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.clouds.s3_credentials import credential_method
from raytrain.storage.open import open_store
from raytrain.storage.request_errors import explain
from raytrain.storage.store import Store

_CLOCK_TOLERANCE_S = 5.0  # a sixth of the time after which a run without a heartbeat loses its claim
_SPILLS_BELOW = 0.95  # used fraction of the disk: the default of RAY_local_fs_capacity_threshold
_WORD_FOR_METHOD = {  # boto3's names for the steps of AWS's credential chain
    "env": "environment",
    "shared-credentials-file": "profile",
    "config-file": "profile",
    "sso": "single sign-on",
}

Versions = dict[str, str | None]  # version of each package; None for one that is not installed


@dataclass(frozen=True)
class Finding:
    """A problem with what to do, and the addresses of the nodes that have it; none if the whole cluster has it."""

    sentence: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DoctorReport:
    """Findings of :func:`diagnose`. Contains no secret.

    ``failures`` prevent training, ``warnings`` do not. ``placement`` is that of ``--workers auto``, None if the cluster
    has no room for a worker. ``all_reduce`` is None on a single node, and if a node did not answer.
    """

    data: str | None
    storage: str
    versions: Versions
    placement: Placement | None
    nodes: tuple[Node, ...]
    all_reduce: AllReduce | None
    failures: tuple[Finding, ...]
    warnings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if nothing prevents training."""
        return not self.failures

    def summary(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def diagnose(data: str | None, storage: str, address: str | None) -> DoctorReport:
    """Check the cluster at ``address``, or this machine, and return all problems that its nodes and it as a whole have.

    Every node tries to read ``data``, if given, to write to ``storage``, and to compute on its GPUs, and reports its
    versions, drivers, clock and disk. The report also has the workers of ``--workers auto`` and, with several nodes,
    the bandwidth between them.

    Raises UsageError if there is no cluster or a URL is wrong, StorageError if the configuration of a cloud is broken.

    Example: ``diagnose("s3://bucket/train", "s3://bucket/runs", address=None).ok``
    """
    data_store, run_store = open_store(data) if data else None, open_store(storage)
    with Connection(address) as cluster:
        cluster.connect()
        with _probe_request(data_store, run_store) as (request, credentials_problem):
            nodes = probe_nodes(request)
        # The bandwidth between nodes can only be measured if all of them have answered.
        num_gpus = [len(node.report.gpus) for node in nodes if node.report is not None]
        all_reduce = measure_all_reduce(num_gpus) if len(num_gpus) == len(nodes) else None
        hardware = cluster_hardware()

    # Place the workers as `--workers auto` does.
    placement, placement_problem = None, None
    try:
        placement = place(recipes.custom(), hardware)
    except UsageError as error:
        placement_problem = str(error)

    # Each check is a sentence about its problem, or None if there is none.
    driver_versions = versions()
    cluster_failures = (credentials_problem, placement_problem, all_reduce and all_reduce.problem)
    cluster_warnings = (
        too_few_data_cpus(hardware, placement),
        folder_on_many_nodes(run_store, hardware.num_nodes),
        different_nvidia_drivers(nodes),
        *private_api.missing(),
    )
    return DoctorReport(
        data=data_store and data_store.url,
        storage=run_store.url,
        versions=driver_versions,
        placement=placement,
        nodes=nodes,
        all_reduce=all_reduce,
        failures=_findings(cluster_failures)
        + group_by_sentence(nodes, lambda node: node_failures(node, driver_versions)),
        warnings=_findings(cluster_warnings) + group_by_sentence(nodes, node_warnings),
    )


@contextmanager
def _probe_request(data: Store | None, storage: Store) -> Iterator[tuple[ProbeRequest, str | None]]:
    """Yield the request to the nodes, and a sentence if looking up this process's credentials has failed, else None.

    The nodes can borrow these credentials until the block ends.
    """
    stores = [store for store in (storage, data) if store is not None]
    bucket = next((store for store in stores if store.cloud is not None), None)
    if bucket is None:
        yield ProbeRequest(data, storage), None
        return
    from raytrain.launch.ray.serve_credentials import serving_credentials  # imports Ray

    with serving_credentials(stores) as (served, _):
        # One word for the step of AWS's credential chain that found the credentials; other clouds do not say it.
        lent_from, problem = "", None
        try:
            method = credential_method() if isinstance(bucket.cloud, S3) else ""
            lent_from = _WORD_FOR_METHOD.get(method, "role" if "role" in method else method)
        except Exception as error:
            problem = str(explain(error, bucket.url, bucket.cloud))
        lent_data, lent_storage = (store and store.with_lent_credentials(served) for store in (data, storage))
        yield ProbeRequest(lent_data, lent_storage, served, lent_from), problem


def _findings(sentences: Iterable[str | None]) -> tuple[Finding, ...]:
    """Return the sentences about the whole cluster as findings, without the Nones."""
    return tuple(Finding(sentence) for sentence in sentences if sentence)


def group_by_sentence(nodes: Iterable[Node], sentences: Callable[[Node], Iterator[str]]) -> tuple[Finding, ...]:
    """Return the sentences about all nodes, each once with the addresses of its nodes."""
    addresses: dict[str, list[str]] = {}
    for node in nodes:
        for sentence in sentences(node):
            addresses.setdefault(sentence, []).append(node.address)
    return tuple(Finding(sentence, tuple(of_nodes)) for sentence, of_nodes in addresses.items())


def node_failures(node: Node, driver_versions: Versions) -> Iterator[str]:
    """Yield sentences on faults of a node that prevent training, or make its results differ from other nodes'."""
    yield from node.problems
    if node.report is None:
        return
    for name, version in node.report.versions.items():
        if version != driver_versions[name]:
            driver_version = driver_versions[name] or "missing"
            yield f"{name} is {version or 'missing'} on the node but {driver_version} here; install the same version."
    if node.gpus >= 1 and not node.report.gpus:
        yield (
            f"The NVIDIA driver reports no GPU, but Ray counts {node.gpus:g}; check the driver, and that a container "
            "runs with --gpus all."
        )


def node_warnings(node: Node) -> Iterator[str]:
    """Yield sentences on oddities of a node that do not prevent training."""
    if node.report is None:
        return
    # Ray may count fewer GPUs than there are.
    if node.gpus < (num_gpus := len(node.report.gpus)):
        yield (
            f"Ray counts {node.gpus:g} of the {format_count(num_gpus, 'GPU')} that the NVIDIA driver reports; start "
            f"Ray with --num-gpus {num_gpus} to use them all."
        )
    # Ray's object store should lie in shared memory; if it does not fit there, it is on a disk, which is slow.
    if node.report.shm_bytes is not None and node.report.shm_bytes < node.object_store_bytes:
        yield (
            f"/dev/shm has {node.report.shm_bytes / 1e9:,.1f} GB and the object store "
            f"{node.object_store_bytes / 1e9:,.1f} GB, so images are written to disk; run the container with "
            f"--shm-size {math.ceil(node.object_store_bytes / 2**30)}g or more."
        )
    # With wrong clocks, a run whose heartbeat looks old is taken over, and S3 refuses signatures.
    if abs(node.clock_ahead_s) > _CLOCK_TOLERANCE_S:
        direction = "ahead of" if node.clock_ahead_s > 0 else "behind"
        yield (
            f"The node's clock is at least {abs(node.clock_ahead_s):.0f} s {direction} this machine's; keep both right "
            "with chrony or another NTP client: heartbeats, leases and S3's signatures count on it."
        )
    # When its object store is full, Ray writes objects to disk, but not to one that is nearly full: then it fails.
    if node.report.disk.used_fraction > _SPILLS_BELOW:
        yield (
            f"The disk of the temporary folder is {node.report.disk.used_fraction:.0%} full, and Ray writes images to "
            f"it, if memory is short, only below {_SPILLS_BELOW:.0%}; make room there."
        )


def different_nvidia_drivers(nodes: Iterable[Node]) -> str | None:
    """Return a sentence if the nodes' GPUs have different drivers."""
    drivers = sorted({gpu.driver for node in nodes if node.report for gpu in node.report.gpus})
    if len(drivers) < 2:
        return None
    return f"The nodes have NVIDIA drivers {', '.join(drivers)}; install the same one, for NCCL depends on it."


def too_few_data_cpus(hardware: Hardware, placement: Placement | None) -> str | None:
    """Return a sentence if reading images will hold up training on GPUs, or has no CPU at all."""
    if placement is None:
        return None
    # A GPU trains faster than one CPU decodes, so each worker needs at least one. Workers that train on CPUs need less
    # time to decode an image than to train on it: one CPU for all of them keeps the run going.
    cpus_left = placement.data_cpus * placement.num_workers
    needed = placement.num_workers if placement.device == "cuda" else 1
    if cpus_left > needed - 0.01:  # fractions of CPUs are rounded down
        return None
    workers = f"{format_count(placement.num_workers, 'worker')} on {placement.device}"
    return (
        f"The cluster has {format_count(hardware.cpus, 'CPU')}, which leaves {cpus_left:.2g} to read images for "
        f"{workers}, so the workers will wait for images; add CPUs, or use fewer --workers."
    )


def folder_on_many_nodes(storage: Store, num_nodes: int) -> str | None:
    """Return a sentence if runs are written to a folder that some nodes may not see."""
    if storage.cloud is not None or num_nodes == 1:
        return None
    return (
        f"{storage.url} is a folder; make sure that all {num_nodes} nodes share it, or use s3://bucket/prefix as "
        "--storage."
    )
