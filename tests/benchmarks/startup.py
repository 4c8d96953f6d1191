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
_EVERY_S = 0.02


def measure(bench: Bench) -> Report:
    command = [
        "raytrain",
        "train",
        "cifar10",
        "--data",
        bench.url,
        "--model",
        "tests.benchmarks.started:network",
        *_OPTIONS,
    ]
    sides = {
        "bare TorchTrainer, loop entered": Side(seconds, {"module": ["tests.benchmarks.bare"]}),
        "raytrain train cifar10, first step done": Side(seconds, {"module": command}),
    }
    results = bench.alternate(sides, bench.scaled(3), "{:.1f} s".format)
    bare, raytrain = (Figure(name, "s", values) for name, values in results.items())
    check = Check("raytrain : bare", raytrain.median / bare.median, at_most=1.1)
    return Report("startup: seconds after the start of the process, on both workers", [bare, raytrain], [check])


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
