"""How training scales over several hosts if the line is the limit, beside the arithmetic of the all-reduce.

The first network has one large layer, so nothing can be sent before its backward has ended: a step takes its
computing and the all-reduce, one after the other. The second one has many layers, whose gradients are summed while
those of the layers before them are being computed: most of its all-reduce takes no time of the step, as with a plain
loop in DistributedDataParallel, which is measured beside it. Both are measured with ``--gradient-dtype bfloat16``, too.

The hosts are namespaces on this machine (see :mod:`tests.helpers.hosts`), so this needs root; they share its cores.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raytrain.runs.metric_row import MetricRow
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.hosts import Host, hosts
from tests.helpers.memory_runs import Recorder
from tests.helpers.small_runs import make_images

_MEGABITS_PER_S = 100
_NUM_HOSTS = (1, 2, 4)
_WIDTH = 8192
_SIDE, _NUM_CLASSES = 12, 3
_IMAGES_PER_WORKER = 30
_STEPS = 8
_DEEP_MEGABITS_PER_S, _DEEP_IMAGES_PER_WORKER, _DEEP_LAYERS, _DEEP_WIDTH = 500, 8, 11, 512
_LEARNING_RATE = 0.001


def network(num_classes: int, channels: int) -> nn.Module:
    """3.6 million parameters in two layers, and next to no arithmetic: the network's size is what counts here."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_SIDE * _SIDE * channels, _WIDTH), nn.Linear(_WIDTH, num_classes))


def deep(num_classes: int, channels: int) -> nn.Module:
    """26 million parameters in 11 equal layers, whose backward takes about as long as their all-reduce."""
    widths = [channels] + [_DEEP_WIDTH] * (_DEEP_LAYERS + 1)
    layers = [nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_DEEP_WIDTH, num_classes)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())), *head)


def measure(bench: Bench) -> Report:
    sides = {f"{number} hosts": Side(train, {"num_hosts": number}) for number in _NUM_HOSTS}
    halved = {"gradient_dtype": "bfloat16"}
    sides |= {f"{number} hosts, bfloat16": Side(train, {"num_hosts": number, **halved}) for number in _NUM_HOSTS[1:]}
    sides |= {
        "deep, 1 host": Side(train, {"num_hosts": 1, "loop": "deep"}),
        "deep, 2 hosts": Side(train, {"num_hosts": 2, "loop": "deep"}),
        "deep, 2 hosts, DistributedDataParallel": Side(train, {"num_hosts": 2, "loop": "ddp"}),
        "deep, 2 hosts, bfloat16": Side(train, {"num_hosts": 2, "loop": "deep", **halved}),
    }
    rounds = bench.alternate(sides, bench.scaled(3), lambda seconds: f"{seconds:.3f} s a step")
    alone = median(rounds["1 hosts"])
    figures: list[Figure] = []
    checks: list[Check] = []
    for number in _NUM_HOSTS:
        seconds = rounds[f"{number} hosts"]
        figures.append(Figure(f"{number} hosts", "images/s", [number * _IMAGES_PER_WORKER / each for each in seconds]))
        if number > 1:
            expected = _all_reduce_s(network, number, _MEGABITS_PER_S)
            figures.append(Figure(f"{number} hosts: all-reduce", "s", [each - alone for each in seconds]))
            figures.append(Figure(f"{number} hosts: all-reduce by arithmetic", "s", [expected]))
            ratio = (median(seconds) - alone) / expected
            checks.append(Check(f"{number} hosts, all-reduce : arithmetic", ratio, at_most=1.25))
            halved_s = rounds[f"{number} hosts, bfloat16"]
            name, speeds = f"{number} hosts, bfloat16", [number * _IMAGES_PER_WORKER / each for each in halved_s]
            figures.append(Figure(name, "images/s", speeds))
            ratio = (median(halved_s) - alone) / (median(seconds) - alone)
            checks.append(Check(f"{number} hosts, sum in bfloat16 : in float32", ratio, at_most=0.65))
    overlap = _overlap({name: seconds for name, seconds in rounds.items() if name.startswith("deep")})
    title = f"network: {_num_bytes(network) / 1e6:.1f} MB of gradients at {_MEGABITS_PER_S} Mbit/s"
    title += f"; deep: {_num_bytes(deep) / 1e6:.1f} MB at {_DEEP_MEGABITS_PER_S} Mbit/s"
    return Report(title, figures + overlap[0], checks + overlap[1])


def _overlap(rounds: dict[str, list[float]]) -> tuple[list[Figure], list[Check]]:
    """Compare what a second host adds to a step of the deep network with its all-reduce, which is hidden in part."""
    alone, ours, ddp, halved = (median(seconds) for seconds in rounds.values())
    expected = _all_reduce_s(deep, 2, _DEEP_MEGABITS_PER_S)
    figures = [Figure(name, "s", seconds) for name, seconds in rounds.items()]
    figures.append(Figure("deep: all-reduce by arithmetic", "s", [expected]))
    checks = [
        Check("deep, time that a second host adds : all-reduce", (ours - alone) / expected, at_most=0.75),
        Check("deep, step : DistributedDataParallel", ours / ddp, at_most=1.05),
        Check("deep, step, bfloat16 : float32", halved / ours, at_most=0.95),
    ]
    return figures, checks


def _num_bytes(make: Callable[[int, int], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(each.numel() * each.element_size() for each in make(_NUM_CLASSES, 3).parameters())


def _all_reduce_s(make: Callable[[int, int], nn.Module], num_hosts: int, megabits_per_s: int) -> float:
    """Each host of a ring sends 2(N-1)/N times the gradients."""
    return 2 * (num_hosts - 1) / num_hosts * _num_bytes(make) * 8 / (megabits_per_s * 1e6)


def train(num_hosts: int, folder: str, loop: str = "wide", gradient_dtype: str = "") -> float:
    """Train on so many hosts, with one worker each; returns the median seconds of a step."""
    (Path(folder) / "images").mkdir()
    make_images(Path(folder) / "images")
    with hosts(Path(folder), [f"h{number}" for number in range(num_hosts)]) as started:
        for host in started.values():
            host.limit(_MEGABITS_PER_S if loop == "wide" else _DEEP_MEGABITS_PER_S)
        _train_on(list(started.values()), Path(folder), loop, gradient_dtype)
    times = json.loads((Path(folder) / "times.json").read_text())
    return median(after - before for before, after in itertools.pairwise(times[1:]))  # the first one connects


def _train_on(machines: list[Host], folder: Path, loop: str, gradient_dtype: str) -> None:
    """Run this module on each host: the loop, without what starts it."""
    join = [f"tcp://{machines[0].address}:29500", str(len(machines)), str(folder), loop, gradient_dtype]
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


def _work(address: str, num_hosts: int, folder: Path, loop: str, gradient_dtype: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_hosts)
    times = _plainly() if loop == "ddp" else _through_raytrain(folder, loop, gradient_dtype, num_hosts, rank)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))


def _through_raytrain(folder: Path, loop: str, gradient_dtype: str, num_hosts: int, rank: int) -> list[float]:
    (folder / f"runs-{rank}").mkdir()
    images = _IMAGES_PER_WORKER if loop == "wide" else _DEEP_IMAGES_PER_WORKER
    run = folder_run(
        folder / "images",
        folder / f"runs-{rank}",
        "network",
        model=f"tests.benchmarks.network:{'network' if loop == 'wide' else 'deep'}",
        image_size=(_SIDE, _SIDE),
        batch_size=num_hosts * images,
        max_steps=_STEPS,
        epochs=num_hosts * _STEPS,
        learning_rate=_LEARNING_RATE,
        precision="float32",
        evaluate_every=0,
        gradient_dtype=gradient_dtype or None,
    )
    clock = _Clock()
    train_here(run, clock)
    return clock.times


def _plainly() -> list[float]:
    """Train the deep network on random images in DistributedDataParallel, and return the time after each step."""
    model = DistributedDataParallel(deep(_NUM_CLASSES, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9)
    times: list[float] = []
    for _ in range(_STEPS):
        images = torch.randn(_DEEP_IMAGES_PER_WORKER, 3, _SIDE, _SIDE)
        labels = torch.randint(_NUM_CLASSES, (_DEEP_IMAGES_PER_WORKER,))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        times.append(time.monotonic())
    return times


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]))
