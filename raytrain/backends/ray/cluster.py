"""Which Ray cluster a command uses, and how its CPUs and GPUs are shared between training and reading data."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrain.backends.ray.local_cluster import LocalCluster
from raytrain.config import TrainConfig
from raytrain.errors import UsageError

_ELASTIC_CPUS = 0.99
"""Of a worker, where Ray decides how many there is room for: one on each CPU, and a little of it left for reading data."""
_CURRENT_CLUSTER = "ray_current_cluster"


@dataclass(frozen=True)
class Hardware:
    """What the nodes of a cluster have together, and the smallest object store among them."""

    num_nodes: int
    cpus: float
    gpus: float
    object_store_bytes: int


@dataclass(frozen=True)
class Placement:
    """How a run is laid over the cluster: ``cpus`` for each worker, ``data_cpus`` for reading each worker's images.

    ``num_workers`` may come down to ``min_workers`` and up again, where the run is elastic.
    """

    num_workers: int
    min_workers: int
    device: str
    cpus: float
    data_cpus: float
    task_cpus: float
    threads: int


class Connection:
    """A cluster that is used while the connection is open: one that runs already, or one started here, which ends with it.

    ``address`` is as Ray has it: of a cluster, ``auto`` for the one on this machine, ``local`` for a new one. By default it
    is the cluster that this process is in, else RAY_ADDRESS, else the one on this machine, else a new one. ``gpus`` are those of
    this machine that a new one uses, such as ``0,2``; by default all.
    """

    def __init__(self, address: str | None, gpus: str | None = None) -> None:
        # Under `uv run`, Ray would pack the current folder for its workers and start each of them through uv. Before Ray is loaded.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        # Or a thread that is still reading when the connection ends starts a Ray of its own by asking for the next block.
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        self._address = address or (None if is_connected() else os.environ.get("RAY_ADDRESS")) or None
        here = self._address == "local" or not (self._address or is_connected() or _local_cluster_runs())
        if gpus and not here:
            raise UsageError(
                f"--gpus is {gpus}, and the run goes to a Ray cluster that runs already, whose GPUs were chosen when it was started; "
                "leave --gpus out, or use --address local for a cluster of its own on this machine."
            )
        self._head = LocalCluster(only_gpus(gpus) if gpus else {}) if here else None
        self._connected = False

    @property
    def started_here(self) -> bool:
        """Whether the cluster was started for this connection."""
        return self._head is not None

    def connect(self) -> None:
        """Join the cluster; raises :class:`UsageError` where there is none at the address."""
        if is_connected():
            if self._head is None:
                return
            raise UsageError(
                "--address is local, and this process is in a Ray cluster already; leave --address out, or ray.shutdown() first."
            )
        if self._address:
            _check_answers(self._address)
        import ray

        address = self._head.address() if self._head else self._address or "auto"
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, str(error).splitlines()[0].rstrip(".")) from None
        self._connected = True

    def close(self) -> None:
        """Leave the cluster, and end it where it was started here."""
        if self._connected:
            import ray

            with suppress(Exception):
                ray.shutdown()
        if self._head is not None:
            self._head.close()


@contextmanager
def connection(address: str | None, gpus: str | None = None) -> Iterator[Connection]:
    """A :class:`Connection` that is on its way when the body begins and closed when it ends."""
    opened = Connection(address, gpus)
    try:
        yield opened
    finally:
        opened.close()


def only_gpus(chosen: str) -> dict[str, str]:
    """The environment of a process that sees the GPUs ``chosen`` of this machine only, such as ``0,2``; as nvidia-smi counts them.

    Raises UsageError where there is none of such a number.
    """
    from raytrain.diagnostics.node_probe import gpus  # not above: the command line must start at once

    found = len(gpus())
    if max(map(int, chosen.split(","))) >= found:
        there_are = f"are {found}, counted from 0" if found else "is none"
        raise UsageError(f"--gpus is {chosen}, and of the GPUs that nvidia-smi sees on this machine there {there_are}; choose among those.")
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}


def hardware() -> Hardware:
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


def place(config: TrainConfig, found: Hardware) -> Placement:
    """Workers, their device and their CPUs; raises :class:`UsageError` where more is asked for than there is."""
    device = ("cuda" if found.gpus >= 1 else "cpu") if config.device == "auto" else config.device
    available = int(found.gpus if device == "cuda" else found.cpus)
    if device == "cuda" and not available:
        raise UsageError(f"--device is cuda, and the cluster's {found.num_nodes} nodes have no GPU; use --device cpu or another --address.")
    fewest, most = config.elastic_workers or (_wanted_workers(config, device, found),) * 2
    if fewest > available:
        kind = "GPUs" if device == "cuda" else "CPUs"
        raise UsageError(f"--workers is {config.workers}, and the cluster has {available} {kind}; ask for at most {available}.")
    # One CPU for each worker where as many are left for reading; otherwise half of all, for reading must never starve.
    now = min(most, available)
    cpus = 1.0 if found.cpus >= 2 * now else _floor(found.cpus / 2 / now)
    if config.elastic_workers and device == "cpu" and found.cpus < 2 * most:
        cpus = _ELASTIC_CPUS
    data_cpus = _floor((found.cpus - cpus * now) / now)
    threads = config.threads_per_worker or max(1, int(found.cpus / now))
    return Placement(most, fewest, device, cpus, data_cpus, min(1.0, data_cpus), threads)


def _wanted_workers(config: TrainConfig, device: str, found: Hardware) -> int:
    if config.workers != "auto":
        return int(config.workers)
    return int(found.gpus) if device == "cuda" else max(1, int(found.cpus * 3 / 4))


def _floor(cpus: float) -> float:
    """Ray counts CPUs in ten-thousandths; rounding up would ask for more than there is."""
    return max(math.floor(cpus * 1000) / 1000, 0.001)


def _check_answers(address: str) -> None:
    """Raise UsageError where no cluster does at ``HOST:PORT``; Ray would try for minutes, and complain all the while.

    Where it asks for a token, this machine's is shown from now on, as Ray does at a cluster that it finds by itself.
    """
    host, separator, port = address.rpartition(":")
    if not separator or "/" in address:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (ValueError, OverflowError):
        raise _no_cluster(address, f"{port} is no port") from None
    except OSError as error:
        raise _no_cluster(address, error.strerror or "no answer within 5 seconds") from None
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    from ray.exceptions import AuthenticationError, RayError

    logging.getLogger("ray").setLevel(logging.ERROR)  # or it would tell of the token as of something to mend
    try:
        GcsClient(address=address)
    except AuthenticationError:
        if "RAY_AUTH_MODE" in os.environ or not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            raise UsageError(
                f"The Ray cluster at {address} asks for a token, and this machine's is not its; "
                "copy ~/.ray/auth_token from its head, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
            ) from None
    except RayError:
        raise _no_cluster(address, "what listens there is no Ray cluster of this version") from None


def _no_cluster(address: str, reason: str) -> UsageError:
    return UsageError(
        f"No Ray cluster answers at {address} ({reason}); check --address or RAY_ADDRESS, or leave both out to use this machine."
    )


def is_connected() -> bool:
    """Whether this process is in a Ray cluster."""
    import sys

    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _local_cluster_runs() -> bool:
    """Whether somebody's ``ray start --head`` answers on this machine (found without importing Ray, which takes a second)."""
    note = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / _CURRENT_CLUSTER
    with suppress(OSError, ValueError):
        host, port = note.read_text().strip().rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=1.0):
            return True
    return False
