"""A whole run, from prompt to prompt: one epoch of cifar10's network on 10,000 images, in float32 on two workers.

raytrain, without Ray and with it, from a folder and from a bucket, is compared with torchrun and torchvision's
ImageFolder, which neither tests nor writes a checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.process_tree import cpu_until_end
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side, served
from tests.benchmarks.started import NOTES

_IMAGES, _OF = 10_000, 50_000
_OPTIONS = [
    "--validation-fraction",
    "0.001",
    "--workers",
    "2",
    "--device",
    "cpu",
    "--epochs",
    "1",
    "--precision",
    "float32",
]
_PLAIN, _LOCAL, _RAY = "torchrun, ImageFolder", "raytrain, --backend local", "raytrain on Ray"
_PHASES = "until the first step", "from the first to the last step", "after the last step"


def measure(bench: Bench) -> Report:
    """Measure each side twice, in turn."""
    with served(bench.images.parent, _IMAGES / _OF, bench.scratch / "whole") as (url, images, environment):
        bench = replace(bench, environment=environment)
        plain = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.benchmarks.plain_training", str(images)]
        train = ["raytrain", "train", "cifar10", "--name", "run", *_OPTIONS]
        train += ["--model", "tests.benchmarks.started:network_of_steps", "--data"]
        local = ["--backend", "local"]
        sides = {
            _PLAIN: Side(whole, {"module": plain}),
            _LOCAL: Side(whole, {"module": [*train, str(images), *local]}),
            f"{_LOCAL}, from a bucket": Side(whole, {"module": [*train, url, *local]}),
            _RAY: Side(whole, {"module": [*train, str(images)]}),
            f"{_RAY}, from a bucket": Side(whole, {"module": [*train, url]}),
        }
        text = "{0[wall]:.1f} s, {0[cpu]:.1f} s of a core".format
        results = bench.alternate(sides, bench.scaled(2), text)
    figures = {
        (name, quantity): Figure(f"{name}: {quantity}", "s", [each[quantity] for each in values])
        for name, values in results.items()
        for quantity in values[0]
    }
    limits = {_LOCAL: 0.85, _RAY: 0.95}
    checks = [
        Check(f"{name} : torchrun, {kind}", figures[name, kind].median / figures[_PLAIN, kind].median, at_most=limit)
        for name, limit in limits.items()
        for kind in ("wall", "cpu")
    ]
    return Report("whole: seconds from prompt to prompt, and of a core (cpu)", list(figures.values()), checks)


def whole(module: list[str], folder: str) -> dict[str, float]:
    """Run the command to its end; returns the seconds that it and its phases took, and those of a core."""
    notes, started = Path(folder, "notes"), time.time()
    own_server = {"PYTHONHASHSEED": str(int(started))}  # a fork server that an earlier command left is not in the tree
    environment = {**os.environ, NOTES: str(notes), **own_server}
    looks = cpu_until_end(subprocess.Popen([sys.executable, "-m", *module], env=environment, cwd=folder))
    steps = sorted(map(float, notes.read_text().split()))
    bounds = [started, steps[0], steps[-1], time.time()]
    used = [looks[min(bisect_left(looks, (bound, 0.0)), len(looks) - 1)][1] for bound in bounds]
    phases = {phase: bounds[i + 1] - bounds[i] for i, phase in enumerate(_PHASES)}
    cores = {f"{phase}, cpu": used[i + 1] - used[i] for i, phase in enumerate(_PHASES)}
    return {"wall": bounds[-1] - started, "cpu": used[-1], **phases, **cores}
