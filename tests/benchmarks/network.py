"""How training scales over several hosts if the network is the limit, beside the arithmetic of the all-reduce.

The hosts are namespaces on this machine (see :mod:`tests.helpers.hosts`), so this needs root; they share its cores.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.hosts import Host, hosts
from tests.helpers.small_runs import make_images

_MEGABITS_PER_S = 100
_NUM_HOSTS = (1, 2, 4)
_WIDTH = 8192
_SIDE, _NUM_CLASSES = 12, 3
_IMAGES_PER_WORKER = 30
_STEPS = 8


def network(num_classes: int, channels: int) -> nn.Module:
    """3.6 million parameters, and next to no arithmetic: the network's size is what counts here."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_SIDE * _SIDE * channels, _WIDTH), nn.Linear(_WIDTH, num_classes))


def measure(bench: Bench) -> Report:
    sides = {f"{number} hosts": Side(train, {"num_hosts": number}) for number in _NUM_HOSTS}
    rounds = bench.alternate(sides, bench.scaled(3), lambda seconds: f"{seconds:.3f} s a step")
    alone = median(rounds["1 hosts"])
    figures: list[Figure] = []
    checks: list[Check] = []
    for number in _NUM_HOSTS:
        seconds = rounds[f"{number} hosts"]
        figures.append(Figure(f"{number} hosts", "images/s", [number * _IMAGES_PER_WORKER / each for each in seconds]))
        if number > 1:
            expected = _all_reduce_s(number)
            figures.append(Figure(f"{number} hosts: all-reduce", "s", [each - alone for each in seconds]))
            figures.append(Figure(f"{number} hosts: all-reduce by arithmetic", "s", [expected]))
            ratio = (median(seconds) - alone) / expected
            checks.append(Check(f"{number} hosts, all-reduce : arithmetic", ratio, at_most=1.25))
    return Report(f"network: {_num_bytes() / 1e6:.1f} MB of gradients at {_MEGABITS_PER_S} Mbit/s", figures, checks)


def _num_bytes() -> int:
    with torch.device("meta"):
        return sum(each.numel() * each.element_size() for each in network(_NUM_CLASSES, 3).parameters())


def _all_reduce_s(num_hosts: int) -> float:
    """Each host of a ring sends 2(N-1)/N times the gradients."""
    return 2 * (num_hosts - 1) / num_hosts * _num_bytes() * 8 / (_MEGABITS_PER_S * 1e6)


def train(num_hosts: int, folder: str) -> float:
    """Train on so many hosts, with one worker each, under torchrun; returns the median seconds of a step."""
    images = Path(folder) / "images"
    images.mkdir()
    make_images(images)
    with hosts(Path(folder), [f"h{number}" for number in range(num_hosts)]) as started:
        for host in started.values():
            host.limit(_MEGABITS_PER_S)
        _train_on(list(started.values()), Path(folder))
    return _step_seconds(Path(folder) / "runs" / "network" / "metrics.jsonl")


def _train_on(machines: list[Host], folder: Path) -> None:
    processes = [
        host.run(
            _command(host.address, rank, len(machines), machines[0].address, folder), {"GLOO_SOCKET_IFNAME": "eth0"}
        )
        for rank, host in enumerate(machines)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (output, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, output, errors)


def _command(address: str, rank: int, num_hosts: int, master: str, folder: Path) -> list[str]:
    group = [f"--nnodes={num_hosts}", f"--node-rank={rank}", "--nproc-per-node=1"]
    group += [f"--master-addr={master}", "--master-port=29500", f"--local-addr={address}"]
    options: dict[str, Any] = {
        "data": folder / "images",
        "storage": folder / "runs",
        "name": "network",
        "model": "tests.benchmarks.network:network",
        "batch-size": num_hosts * _IMAGES_PER_WORKER,
        "max-steps": _STEPS,
        "epochs": num_hosts * _STEPS,
        "learning-rate": 0.001,
        "log-every": 1,
        "precision": "float32",
        "device": "cpu",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    size = ["--image-size", str(_SIDE), str(_SIDE)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *group, "-m", "raytrain"]
    return [*torchrun, "train", "custom", *words, *size]


def _step_seconds(history: Path) -> float:
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    times = [row["elapsed_s"] for row in rows if row["kind"] == "step"]
    return median(after - before for before, after in itertools.pairwise(times[1:]))  # the first one connects
