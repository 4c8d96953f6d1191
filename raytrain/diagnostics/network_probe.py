"""The network between the nodes of a cluster: each node's interface, and the bandwidth of an all-reduce over all nodes.

``python -m raytrain.diagnostics.network_probe RANK NUM_RANKS HOST PORT DEVICE`` is one rank of that all-reduce.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from raytrain.errors import UsageError
from raytrain.launch.ray.nodes import ClusterNode, NodeResult, run_on_each_node

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 90.0  # torch alone may take 30 s to import
_MEET_WITHIN = timedelta(seconds=30)
_WARM_UP_BYTES = 1 << 20
_TENSOR_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # by device
_ROUNDS = 3  # of which the fastest counts
_OPEN_THE_PORTS = (
    "open all TCP ports between the nodes, and if a node has several interfaces, name the right one in "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there."
)


@dataclass(frozen=True)
class Interface:
    """The network interface that has a node's address, and its speed; None if its driver does not report one."""

    name: str
    bits_per_s: int | None


def interface_of(address: str) -> Interface | None:
    """Return the interface of this machine that has ``address``; None if none has, as behind address translation."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [known.address for known in addresses]:
            megabits = psutil.net_if_stats()[name].speed
            return Interface(name, megabits * 10**6 if megabits > 0 else None)
    return None


@dataclass(frozen=True)
class AllReduce:
    """Bus bandwidth of an all-reduce over all nodes with ``backend``, or, if it failed, the ``problem``."""

    backend: str  # nccl or gloo
    num_nodes: int
    bytes_per_s: float | None = None  # of the slowest node; None if it failed
    problem: str | None = None  # a sentence that says what to do


def measure_all_reduce(num_gpus: Sequence[int]) -> AllReduce | None:
    """Measure an all-reduce over all nodes, with NCCL if each has a GPU, else gloo; return None for a single node.

    ``num_gpus`` has the number of GPUs of each node.
    """
    if len(num_gpus) < 2:
        return None
    # The ranks meet at a port of the first node. Each is a process of its own, so that one that hangs does no harm.
    device, backend = ("cuda", "nccl") if min(num_gpus) else ("cpu", "gloo")
    ports = run_on_each_node(_free_port, _TIMEOUT_S)
    if (meet_at := ports[0].result) is None:
        return _failure(backend, len(ports), ports[0])
    one_rank = partial(_start_rank, device, tuple(port.node.id for port in ports), meet_at)
    results = run_on_each_node(one_rank, _TIMEOUT_S)
    if failed := next((result for result in results if result.result is None), None):
        return _failure(backend, len(results), failed)
    return AllReduce(backend, len(results), bytes_per_s=min(result.result for result in results if result.result))


def _free_port(node: ClusterNode) -> tuple[str, int]:
    """Return this node's address, and a free port at which the others can meet its process."""
    with socket.socket() as opened:
        opened.bind(("", 0))
        return node.address, opened.getsockname()[1]


def _start_rank(device: str, node_ids: tuple[str, ...], meet_at: tuple[str, int], node: ClusterNode) -> float:
    """Return the bandwidth in bytes/s that this node measures, in a process of its own.

    The node's rank is its position in ``node_ids``; ``meet_at`` is the host and port of rank 0.
    """
    arguments = map(str, (node_ids.index(node.id), len(node_ids), *meet_at, device))
    # The process ends before Ray's task of this node does, so that its own error is reported.
    output = python_with_all_gpus(["-m", "raytrain.diagnostics.network_probe", *arguments], _TIMEOUT_S - 5)
    return float(output.splitlines()[-1])


def _failure(backend: str, num_nodes: int, failed: NodeResult[Any]) -> AllReduce:
    """Return the result of an all-reduce that did not come about, with the error of the node that ``failed``."""
    problem = f"The nodes could not add up a tensor over the network with {backend} ({failed.error}); {_OPEN_THE_PORTS}"
    return AllReduce(backend, num_nodes, problem=problem)


def python_with_all_gpus(arguments: Sequence[str], timeout_s: float) -> str:
    """Run Python in a process that sees all GPUs, also those that Ray hides from this one; return its output.

    Raises UsageError with the last line of its standard error if it fails, and subprocess.TimeoutExpired, which has
    ended the process, after ``timeout_s``.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise UsageError((done.stderr.strip().splitlines() or ["no error message"])[-1].rstrip("."))
    return done.stdout


def all_reduce(rank: int, num_ranks: int, host: str, port: str, device: str) -> float:
    """Meet the other ranks at ``tcp://HOST:PORT``, which rank 0 opens; return the bus bandwidth in bytes/s.

    ``device`` is cuda, with NCCL, or cpu, with gloo. The bandwidth is defined as in nccl-tests: each of the N ranks of
    a ring sends 2(N-1)/N times the tensor (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=_MEET_WITHIN,
    )
    try:
        _time_all_reduce(torch.ones(_WARM_UP_BYTES // 4, device=device))  # the first all-reduce opens the connections
        tensor = torch.ones(_TENSOR_BYTES[device] // 4, device=device)
        return 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / min(_time_all_reduce(tensor) for _ in range(_ROUNDS))
    finally:
        dist.destroy_process_group()


def _time_all_reduce(tensor: torch.Tensor) -> float:
    """Return the seconds of one all-reduce of ``tensor``, which all ranks begin at the same time."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    print(all_reduce(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
