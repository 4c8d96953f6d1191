"""Start-up time: raytrain until its first optimizer step, compared with a bare TorchTrainer until its empty loop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.process_tree import end_tree
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.benchmarks.started import NOTES

_OPTIONS = ["--test-fraction", "0.001", "--workers", "2", "--device", "cpu", "--epochs", "2"]
_TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
_EVERY_S = 0.02


def measure(bench: Bench) -> Report:
    train = ["raytrain", "train", "cifar10", "--data", bench.url, "--name", "run"]
    train += ["--model", "tests.benchmarks.started:network", *_OPTIONS]
    commands = {
        "bare TorchTrainer, loop entered": ["tests.benchmarks.bare"],
        "raytrain train cifar10, first step done": train,
        "the same with --backend local": [*train, "--backend", "local"],
        "the same under torchrun": [*_TORCHRUN, *train],
    }
    sides = {name: Side(seconds, {"module": command}) for name, command in commands.items()}
    results = bench.alternate(sides, bench.scaled(3), "{:.1f} s".format)
    figures = [Figure(name, "s", values) for name, values in results.items()]
    bare, ray, local, torchrun = (figure.median for figure in figures)
    checks = [
        Check("raytrain : bare", ray / bare, at_most=1.1),
        Check("--backend local : raytrain", local / ray, at_most=0.5),
        Check("--backend local : torchrun", local / torchrun, at_most=0.8),
    ]
    return Report("startup: seconds after the start of the process, on both workers", figures, checks)


def seconds(module: list[str], folder: str) -> float:
    """Return the seconds until both workers have noted their start, and end the command."""
    notes = Path(folder, "notes")
    notes.touch()
    started = time.time()
    command = subprocess.Popen([sys.executable, "-m", *module], env=os.environ | {NOTES: str(notes)}, cwd=folder)
    while len(times := notes.read_text().split()) < 2:
        if command.poll() is not None:
            raise RuntimeError(f"{module} ended with {command.returncode} before both workers had started")
        time.sleep(_EVERY_S)
    end_tree(command)
    return max(map(float, times)) - started
