"""How training scales over several hosts if the network is the limit, beside the arithmetic of the all-reduce.

The hosts are namespaces on this machine (see :mod:`tests.helpers.hosts`), so this needs root; they share its cores.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from raytrain.runs.metric_row import MetricRow
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.hosts import Host, hosts
from tests.helpers.small_runs import make_images
from tests.integration.test_exact import Recorder

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
    """Train on so many hosts, with one worker each; returns the median seconds of a step."""
    (Path(folder) / "images").mkdir()
    make_images(Path(folder) / "images")
    with hosts(Path(folder), [f"h{number}" for number in range(num_hosts)]) as started:
        for host in started.values():
            host.limit(_MEGABITS_PER_S)
        _train_on(list(started.values()), Path(folder))
    times = json.loads((Path(folder) / "times.json").read_text())
    return median(after - before for before, after in itertools.pairwise(times[1:]))  # the first one connects


def _train_on(machines: list[Host], folder: Path) -> None:
    """Run this module on each host: the loop, without what starts it."""
    join = [f"tcp://{machines[0].address}:29500", str(len(machines)), str(folder)]
    command = [sys.executable, "-m", __name__, *join]
    processes = [host.run([*command, str(rank)], {"GLOO_SOCKET_IFNAME": "eth0"}) for rank, host in enumerate(machines)]
    outputs = [process.communicate() for process in processes]
    for process, (output, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, output, errors)


class _Clock(Recorder):
    """Notes the time of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def record(self, row: MetricRow) -> None:
        if row.kind == "step":
            self.times.append(time.monotonic())


def _work(address: str, num_hosts: int, folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_hosts)
    (folder / f"runs-{rank}").mkdir()
    run = folder_run(
        folder / "images",
        folder / f"runs-{rank}",
        "network",
        model="tests.benchmarks.network:network",
        image_size=(_SIDE, _SIDE),
        batch_size=num_hosts * _IMAGES_PER_WORKER,
        max_steps=_STEPS,
        epochs=num_hosts * _STEPS,
        learning_rate=0.001,
        precision="float32",
    )
    clock = _Clock()
    train_here(run, clock)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(clock.times))


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
