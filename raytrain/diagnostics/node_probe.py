"""Probes the nodes of a cluster, all at the same time, and without importing torch, which may be broken there."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any, TypeVar

import psutil

from raytrain.data.labels.listing import SUFFIXES
from raytrain.data.labels.manifest import open_packed
from raytrain.diagnostics.network_probe import Interface, interface_of, python_with_all_gpus
from raytrain.errors import RaytrainError, StorageError, UsageError
from raytrain.launch.gpus import Gpu, gpus
from raytrain.launch.placement import fastest_precision
from raytrain.launch.ray.connection import Connection, uses_cluster
from raytrain.launch.ray.nodes import ClusterNode, run_on_each_node
from raytrain.loader.machine import cores
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.clouds.s3_credentials import own_role
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.request_errors import explain
from raytrain.storage.store import Store

T = TypeVar("T")

_NUM_OBJECTS_READ = 48  # images or packed shards
_TORCH_TIMEOUT_S = 60.0
TIMEOUT_S = 120.0  # for all checks of a node
TORCH_CHECK = "import torch; torch.ones(1, device='cuda').sum().item()"


@dataclass(frozen=True)
class ProbeRequest:
    """Stores that every node checks. Contains no secret: the stores and ``lent`` fetch credentials on the node."""

    data: Store | None = None
    storage: Store | None = None
    lent: LentCredentials | None = None  # the driver's credentials; None if all stores are folders
    lent_from: str = ""  # one word for where the driver found its credentials, such as profile; empty if not known


@dataclass(frozen=True)
class ReadSpeed:
    """Speed at which a node listed and read a few dozen images or packed shards."""

    listing_s: float
    num_images: int
    images_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Disk:
    """The disk that Ray writes images to if the object store is full."""

    free_bytes: int
    total_bytes: int

    @property
    def used_fraction(self) -> float:
        """Used fraction of the disk, from 0 to 1."""
        return 1 - self.free_bytes / self.total_bytes


@dataclass(frozen=True)
class NodeReport:
    """Report of a node. Fields that failed or were not checked are None; ``problems`` say what to do about it."""

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    shm_bytes: int | None
    identity: str | None  # whose credentials the node uses
    read_speed: ReadSpeed | None
    writable: bool
    problems: tuple[str, ...]
    precision: str  # the fastest precision that trains well on the node's GPUs, or else on its CPU
    interface: Interface | None  # the network interface through which the other nodes reach this one
    disk: Disk
    clock_s: tuple[float, float]  # the node's clock when the check began, and when it ended, in seconds since 1970


def probe_node(request: ProbeRequest, node: ClusterNode) -> NodeReport:
    """Check the machine of this process, which Ray describes as ``node``, and return what was found.

    A check that fails adds a sentence to the report's ``problems``, and raises nothing.
    """
    started = time.time()
    problems: dict[str, None] = {}  # a set of sentences that keeps their order
    data, storage = request.data, request.storage

    # The hardware of the machine.
    own_gpus = gpus()
    disk = psutil.disk_usage(tempfile.gettempdir())  # where Ray has its folder, unless it was started with another
    shm_bytes = None
    with suppress(OSError):
        shm_bytes = shutil.disk_usage("/dev/shm").total

    def can_write() -> bool:
        assert storage is not None
        storage.check_writable()
        return True

    # Try what the machine has to do in a run: compute on its GPUs, get credentials, read and write. Each of these may
    # add to ``problems``, which stand after them in the report.
    if own_gpus and node.gpus >= 1:
        _attempt(_check_torch, None, problems)
    return NodeReport(
        versions=versions(),
        gpus=own_gpus,
        shm_bytes=shm_bytes,
        identity=_attempt(lambda: _identity(request), storage, problems) if storage else None,
        read_speed=_attempt(lambda: _measure_read_speed(data), data, problems) if data else None,
        writable=bool(storage and _attempt(can_write, storage, problems)),
        problems=tuple(problems),
        precision=fastest_precision("cuda" if own_gpus else "cpu"),
        interface=interface_of(node.address),
        disk=Disk(disk.free, disk.total),
        clock_s=(started, time.time()),
    )


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that must be equal on all nodes; None for one that is not installed."""
    installed: dict[str, str | None] = {"raytrain": None, "ray": None, "torch": None}
    for name in installed:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return {**installed, "python": platform.python_version()}


def _attempt(action: Callable[[], T], store: Store | None, problems: dict[str, None]) -> T | None:
    """Return the result of ``action``; None if it fails, after adding a sentence about that to ``problems``.

    ``store`` is the one that the action uses, None for torch.
    """
    try:
        return action()
    except Exception as error:
        url, cloud = (store.url, store.cloud) if store else ("torch", None)
        problems[str(error if isinstance(error, RaytrainError) else explain(error, url, cloud))] = None
        return None


def _identity(request: ProbeRequest) -> str | None:
    """Return whose credentials this node uses, as a text without a secret: ``own role …``, ``driver's profile …``.

    Return ``none`` if the driver has none to lend, and None if all stores are folders.
    """
    store = next((store for store in (request.storage, request.data) if store and store.cloud), None)
    if request.lent is None or store is None or store.cloud is None:
        return None
    if isinstance(store.cloud, S3) and store.cloud.is_amazon and (role := own_role()):
        return f"own role {role.identity}"
    credentials = request.lent(store.cloud.name)
    return " ".join(filter(None, ("driver's", request.lent_from, credentials.identity))) if credentials else "none"


def _measure_read_speed(store: Store) -> ReadSpeed:
    """List and read the first shards, or the first images of a listing."""
    # List: the manifest of packed images says how many are in each shard.
    started = time.perf_counter()
    packed = open_packed(store)
    if packed is not None and (packing := packed.packing) is not None:
        paths = list(packing.shards[:_NUM_OBJECTS_READ])
        num_images = int((packing.shard < len(paths)).sum())
    else:
        images = (stored.path for stored in store.list() if stored.path.lower().endswith(SUFFIXES))
        paths = list(islice(images, _NUM_OBJECTS_READ))
        num_images = len(paths)
    if not paths:
        raise UsageError(
            f"There are no images below {store.url}; check --data, and that their names end in {', '.join(SUFFIXES)}."
        )

    # Read: with all requests at once, as training does.
    listed = time.perf_counter()
    contents = store.get_many(paths)
    seconds = time.perf_counter() - listed
    num_bytes = 0
    for content in contents:
        if isinstance(content, FileNotFoundError):
            raise StorageError(
                f"{content} was listed but does not exist any more; check whether something deletes the images, or "
                "try again."
            )
        if isinstance(content, Exception):
            raise content
        num_bytes += len(content)
    return ReadSpeed(listed - started, num_images, num_images / seconds, num_bytes / seconds)


def _check_torch() -> None:
    """Compute on the first GPU, in another process; raise UsageError with torch's words if that fails."""
    try:
        python_with_all_gpus(["-c", TORCH_CHECK], _TORCH_TIMEOUT_S)
    except UsageError as error:
        raise UsageError(
            f"torch cannot compute on the GPUs ({error}); install an NVIDIA driver and a torch that fit each other."
        ) from None


@dataclass(frozen=True)
class Node(ClusterNode):
    """A node of the cluster and what it reported. Without a report, ``error`` is a sentence that says why."""

    report: NodeReport | None = None
    error: str | None = None
    clock_ahead_s: float = 0.0
    """Seconds by which the node's clock is ahead of this machine's, at least; below 0 if it is behind."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems that the node found, or why it has not answered, as sentences that say what to do."""
        return self.report.problems if self.report else (self.error or "",)

    def devices(self) -> dict[str, Any]:
        """Return the node's address, CPUs, memory, numbered GPUs and problems as values of JSON."""
        reported = self.report.gpus if self.report else ()
        return {
            "address": self.address,
            "id": self.id,
            "cpus": self.cpus,
            "memory_bytes": self.memory_bytes,
            "gpus": [{"number": number, **dataclasses.asdict(gpu)} for number, gpu in enumerate(reported)],
            "problems": list(self.problems),
        }


def probe_nodes(request: ProbeRequest) -> tuple[Node, ...]:
    """Probe all nodes at the same time, so that a broken node delays no other; all read at once, as in training.

    A node that does not answer has an error in place of a report.

    Example: ``probe_nodes(ProbeRequest())`` probes hardware and software only.
    """
    asked = time.time()
    results = run_on_each_node(lambda node: probe_node(request, node), TIMEOUT_S)
    answered = time.time()
    nodes: list[Node] = []
    for result in results:
        ahead = 0.0
        if result.result:
            # A node begins after ``asked`` and ends before ``answered``. If its own clock says that it began earlier,
            # that clock is behind, and if it says that it ended later, it is ahead: by this much at least.
            started, ended = result.result.clock_s
            ahead = min(0.0, started - asked) + max(0.0, ended - answered)
        nodes.append(Node(**vars(result.node), report=result.result, error=result.error, clock_ahead_s=ahead))
    return tuple(nodes)


def list_devices(address: str | None) -> tuple[Node, ...]:
    """List the devices of every node of the cluster at ``address``, or of this machine if no cluster runs.

    Raises UsageError if there is no cluster at the address.
    """
    if address == "local" or not uses_cluster(address):
        memory = psutil.virtual_memory().total
        machine = ClusterNode("this", "machine", cores(), len(gpus()), memory_bytes=memory, object_store_bytes=0)
        return (Node(**vars(machine), report=probe_node(ProbeRequest(), machine)),)
    with Connection(address) as cluster:
        cluster.connect()
        return probe_nodes(ProbeRequest())
