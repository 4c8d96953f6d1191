"""Time of a step with ``raytrain.parallel`` beside DistributedDataParallel, in processes of one thread.

Both take turns in the same processes, so that whatever else the machine does meets both. Networks without batch norm
are compared: torch's SyncBatchNorm needs GPUs, so on a CPU that of DistributedDataParallel is each process's own. What
joining it costs is shown beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import raytrain
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.gloo_processes import run_in_processes

_NUM_PROCESSES = (2, 4)
_BATCH = 32
_STEPS_IN_TURN = 5
_WARM_UP = 2  # turns


def few_large() -> nn.Module:
    """12.6 million parameters in 3 tensors."""
    widths = [(768, 4096), (4096, 2048), (2048, 512)]
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*width, bias=False) for width in widths))


def many_small() -> nn.Module:
    """0.25 million parameters in 240 tensors."""
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)) for _ in range(40)]
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 64), *blocks)


def normed() -> nn.Module:
    """20 layers of batch norm."""
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(19)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), *blocks, nn.Flatten(), nn.Linear(3136, 64))


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "few large parameters": few_large,
    "many small parameters": many_small,
    "20 batch norms": normed,
}


def measure(bench: Bench) -> Report:
    figures: list[Figure] = []
    checks: list[Check] = []
    for num_processes in _NUM_PROCESSES:
        for network in _NETWORKS:
            turns = bench.scaled(30, least=4)
            arguments = {"num_processes": num_processes, "network": network, "turns": turns}
            times: dict[str, list[float]] = bench.alone(Side(step_times, arguments))
            name = f"{num_processes} processes, {network}"
            figures += [Figure(f"{name}: {kind}", "ms", [median(values)]) for kind, values in times.items()]
            ratio = median(times["DDP"]) / median(times["raytrain"])
            if network != "20 batch norms":
                checks.append(Check(f"{name}: DDP : raytrain", ratio, at_least=0.95))
    return Report(f"parallel: a step of {_BATCH} images in each process of 1 thread", figures, checks)


def step_times(num_processes: int, network: str, turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each turn of both, on the first process."""
    return run_in_processes(num_processes, _take_turns, network, turns)[0]


def _take_turns(network: str, turns: int) -> dict[str, list[float]]:
    build = _NETWORKS[network]
    models = {"DDP": DistributedDataParallel(build()), "raytrain": raytrain.parallel(build())}
    optimizers = {kind: torch.optim.SGD(model.parameters(), lr=0.001) for kind, model in models.items()}
    images, labels = torch.randn(_BATCH, 3, 16, 16), torch.randint(0, 64, (_BATCH,))
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for turn in range(_WARM_UP + turns):
        for kind, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(_STEPS_IN_TURN):
                optimizers[kind].zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizers[kind].step()
            if turn >= _WARM_UP:
                times[kind].append((time.perf_counter() - started) / _STEPS_IN_TURN * 1000)
    return times
