"""The network between the nodes, by an all-reduce over all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from raytrain.errors import UsageError
from raytrain.launch.ray.on_each_node import ClusterNode, NodeResult, run_on_each_node

_MEET_WITHIN = timedelta(seconds=30)
_WARM_UP_BYTES = 1 << 20
_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
_ROUNDS = 3


def main() -> None:
    """Meet the other ranks at ``tcp://HOST:PORT``, which rank 0 opens, and measure."""
    rank, num_ranks, host, port, device = sys.argv[1:]
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=int(rank),
        world_size=int(num_ranks),
        timeout=_MEET_WITHIN,
    )
    try:
        print(_bytes_per_s(torch.device(device), int(num_ranks)))
    finally:
        dist.destroy_process_group()


def _bytes_per_s(device: torch.device, num_ranks: int) -> float:
    _seconds(torch.ones(_WARM_UP_BYTES // 4, device=device))  # the first one connects
    tensor = torch.ones(_BYTES[device.type] // 4, device=device)
    seconds = min(_seconds(tensor) for _ in range(_ROUNDS))
    return 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / seconds


def _seconds(tensor: torch.Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

_TIMEOUT_S = 90.0  # torch alone may take 30 s to import
_OPEN_THE_PORTS = (
    "open all TCP ports between the nodes, and if a node has several interfaces, name the right one in "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there."
)


@dataclass(frozen=True)
class Interface:
    """The network interface that has a node's address, and its speed in bits/s, if the driver knows it."""

    name: str
    bits_per_s: int | None


def interface_of(address: str) -> Interface | None:
    """This machine's interface with ``address``; None if it has none, as behind address translation."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            megabits = psutil.net_if_stats()[name].speed
            return Interface(name, megabits * 10**6 if megabits > 0 else None)
    return None


@dataclass(frozen=True)
class AllReduce:
    """How fast all nodes together added up a tensor with ``backend``, as a bus bandwidth; else why they could not."""

    backend: str
    num_nodes: int
    bytes_per_s: float | None = None
    problem: str | None = None


def measure_all_reduce(num_gpus: Sequence[int]) -> AllReduce | None:
    """Let all nodes of the connected cluster add up a tensor; None if there is only one.

    ``num_gpus``: how many GPUs each node reported. With one GPU at least in each, they do it with NCCL, else with gloo.
    """
    if len(num_gpus) < 2:
        return None
    device, backend = ("cuda", "nccl") if min(num_gpus) else ("cpu", "gloo")
    ports = run_on_each_node(_free_port, _TIMEOUT_S)
    if (meet_at := ports[0].result) is None:
        return _failure(backend, len(ports), ports[0])
    results = run_on_each_node(_Part(device, tuple(each.node.id for each in ports), meet_at), _TIMEOUT_S)
    if failed := next((each for each in results if each.result is None), None):
        return _failure(backend, len(results), failed)
    return AllReduce(backend, len(results), bytes_per_s=min(each.result for each in results if each.result))


def _free_port(node: ClusterNode) -> tuple[str, int]:
    """Where the others may meet this node's process."""
    with socket.socket() as opened:
        opened.bind(("", 0))
        return node.address, opened.getsockname()[1]


@dataclass(frozen=True)
class _Part:
    """What each node does: it runs its rank in a process of its own, which may hang, and sees all GPUs."""

    device: str
    node_ids: tuple[str, ...]
    meet_at: tuple[str, int]

    def __call__(self, node: ClusterNode) -> float:
        host, port = self.meet_at
        rank = self.node_ids.index(node.id)
        words = [str(rank), str(len(self.node_ids)), host, str(port), self.device]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-m", "raytrain.diagnostics.network_probe", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S - 5,
            check=False,
        )
        if done.returncode:
            raise UsageError((done.stderr.strip().splitlines() or ["no error message"])[-1].rstrip("."))
        return float(done.stdout.splitlines()[-1])


def _failure(backend: str, num_nodes: int, failed: NodeResult[Any]) -> AllReduce:
    problem = f"The nodes could not add up a tensor over the network with {backend} ({failed.error}); {_OPEN_THE_PORTS}"
    return AllReduce(backend, num_nodes, problem=problem)
