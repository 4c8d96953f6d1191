"""What one node finds out about itself: its GPUs, and whether it can read the data and write the runs. Runs there, as a task.

Imports neither Ray nor torch, so that it says something also where those are out of order.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import TypeVar

from raytrain.data.manifest import SUFFIXES, open_packed
from raytrain.errors import RaytrainError, StorageError, UsageError
from raytrain.storage.base import Store
from raytrain.storage.credentials import OwnRoleOr, own_role
from raytrain.storage.errors import explain

_T = TypeVar("_T")

_NUM_READ = 48
_GPU_FIELDS = "name,memory.total,driver_version,compute_cap"
_TIMEOUT_S = 60.0
_CHECKED_WITH = re.compile(r"/\.write-check-[0-9a-f]+")  # the object's name says nothing, and differs from node to node
_TRY_TORCH = "import torch; torch.ones(1, device='cuda').sum().item()"


@dataclass(frozen=True)
class ProbeRequest:
    """What every node is asked of the stores, if any. Holds no secret: they and the source ask for credentials on the node."""

    data: Store | None
    storage: Store | None
    source: OwnRoleOr | None
    """None where no store needs credentials."""
    resolved_by: str
    """How the credentials that ``source`` serves were found, in a word."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi tells it; ``memory_bytes`` is 0 where it does not tell."""

    name: str
    memory_bytes: int
    driver: str
    capability: str


@dataclass(frozen=True)
class ReadSpeed:
    """How fast a few dozen images, or packed shards, were listed and read."""

    listing_s: float
    num_images: int
    images_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class NodeReport:
    """What a node found; ``problems`` are sentences that say what to do, and what is None could not be found or done."""

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    shm_bytes: int | None
    identity: str | None
    reading: ReadSpeed | None
    writable: bool
    problems: tuple[str, ...]


def examine(question: ProbeRequest, num_gpus: float) -> NodeReport:
    """Answer the question on this node, of which Ray counts ``num_gpus`` GPUs."""
    problems: dict[str, None] = {}  # in order, each once
    data, storage = question.data, question.storage
    found = gpus()
    if found and num_gpus >= 1:
        _attempt(_try_torch, "torch", problems)
    return NodeReport(
        versions=versions(),
        gpus=found,
        shm_bytes=_shm_bytes(),
        identity=_attempt(lambda: _identity(question), storage.url, problems) if storage else None,
        reading=_attempt(lambda: _read(data), data.url, problems) if data else None,
        writable=bool(storage and _attempt(lambda: _write(storage), storage.url, problems)),
        problems=tuple(problems),
    )


def versions() -> dict[str, str | None]:
    """Versions of what must agree over a cluster; None of what is not installed."""
    return {name: _version(name) for name in ("raytrain", "ray", "torch")} | {"python": platform.python_version()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _attempt(action: Callable[[], _T], url: str, problems: dict[str, None]) -> _T | None:
    try:
        return action()
    except Exception as error:
        problems[str(error if isinstance(error, RaytrainError) else explain(error, url))] = None
        return None


def _identity(question: ProbeRequest) -> str | None:
    """With what credentials this node enters S3, and whose they are."""
    if question.source is None:
        return None
    if role := own_role():
        return f"own role {role.identity}"
    served = question.source.fallback()
    return f"driver's {question.resolved_by} {served.identity}" if served else "none"


def _read(store: Store) -> ReadSpeed:
    begun = time.perf_counter()
    packed = open_packed(store)
    if packed is not None and packed.packing is not None:
        paths = list(packed.packing.shards[:_NUM_READ])
        num_images = int((packed.packing.shard < len(paths)).sum())
    else:
        paths = list(islice((found.path for found in store.list() if found.path.lower().endswith(SUFFIXES)), _NUM_READ))
        num_images = len(paths)
    if not paths:
        raise UsageError(f"There are no images below {store.url}; check --data, and that names end in {', '.join(SUFFIXES)}.")
    listed = time.perf_counter()
    contents = store.get_many(paths)
    took_s = time.perf_counter() - listed
    num_bytes = sum(len(_content(content)) for content in contents)
    return ReadSpeed(listed - begun, num_images, num_images / took_s, num_bytes / took_s)


def _content(read: bytes | Exception) -> bytes:
    if isinstance(read, FileNotFoundError):
        raise StorageError(f"{read} was listed and cannot be found; look whether something deletes the images, or repeat the command.")
    if isinstance(read, Exception):
        raise read
    return read


def _write(store: Store) -> bool:
    try:
        store.check_writable()
    except StorageError as error:
        raise StorageError(_CHECKED_WITH.sub("", str(error))) from error
    return True


def _shm_bytes() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def gpus() -> tuple[Gpu, ...]:
    """This node's GPUs, in the order of their numbers; none where nvidia-smi is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return tuple(_gpu(line) for line in told.stdout.splitlines() if line.count(", ") >= 3)
    return ()


def _gpu(line: str) -> Gpu:
    name, memory_mib, driver, capability = line.rsplit(", ", 3)
    return Gpu(name.strip(), int(memory_mib) << 20 if memory_mib.isdigit() else 0, driver.strip(), capability.strip())


def _try_torch() -> None:
    """Compute on the first GPU, in a process of its own: Ray hides the GPUs from tasks that ask for none."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", _TRY_TORCH]
    tried = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no word"])[-1].rstrip(".")
        raise UsageError(f"torch cannot compute on the GPUs ({reason}); install a driver and a torch that fit each other.")
