"""Start-up time: raytrain until its first optimizer step, compared with a bare TorchTrainer until its empty loop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from raytrain.launch.ray.own_cluster import lean
from tests.benchmarks.process_tree import CpuOfTree, end_tree
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.benchmarks.started import NOTES

_OPTIONS = ["--test-fraction", "0.001", "--workers", "2", "--device", "cpu", "--epochs", "2"]
_KINDS = "wall", "cpu"
_LOOK_EVERY_S = 0.2


def measure(bench: Bench) -> Report:
    train = ["raytrain", "train", "cifar10", "--data", bench.url, "--name", "run"]
    train += ["--model", "tests.benchmarks.started:network", *_OPTIONS]
    bare_loop = "bare TorchTrainer, loop entered"
    commands = {
        bare_loop: ["tests.benchmarks.bare"],
        "raytrain train cifar10, first step done": train,
        "the same with --backend local": [*train, "--backend", "local"],
    }
    sides = {name: Side(start_up, {"module": command}) for name, command in commands.items()}
    sides[f"{bare_loop}, without the grammar that JupyterLab brings"] = Side(
        start_up, {"module": commands[bare_loop], "without_grammar": True}
    )
    results = bench.alternate(sides, bench.scaled(3), "{0[wall]:.1f} s, {0[cpu]:.1f} s of a core".format)
    wall, cpu = (
        [Figure(name, "s", [each[kind] for each in values]) for name, values in results.items()] for kind in _KINDS
    )
    bare, ray, local, lean_bare = (figure.median for figure in wall)
    bare_cpu, ray_cpu, *_, lean_bare_cpu = (figure.median for figure in cpu)
    checks = [
        Check("raytrain : bare", ray / bare, at_most=0.4),
        Check("raytrain : bare, seconds of a core", ray_cpu / bare_cpu, at_most=0.4),
        Check("raytrain : bare without the grammar", ray / lean_bare, at_most=0.6),
        Check("raytrain : bare without the grammar, seconds of a core", ray_cpu / lean_bare_cpu, at_most=0.6),
        Check("--backend local : raytrain", local / ray, at_most=1.0),
    ]
    figures = wall + [replace(figure, name=f"{figure.name}, all cores together") for figure in cpu]
    return Report("startup: seconds after the start of the process, on both workers", figures, checks)


def start_up(module: list[str], folder: str, *, without_grammar: bool = False) -> dict[str, float]:
    """End the command as soon as both workers have noted their start; ``without_grammar``: see ``lean_imports.py``.

    Returns the seconds until then (``wall``), and those of a core that its processes took (``cpu``).
    """
    notes = Path(folder, "notes")
    notes.touch()
    started = time.time()
    environment = (lean(os.environ) if without_grammar else dict(os.environ)) | {NOTES: str(notes)}
    command = subprocess.Popen([sys.executable, "-m", *module], env=environment, cwd=folder)
    tree = CpuOfTree(command.pid)
    used = before = tree.look()
    while len(times := notes.read_text().split()) < 2:
        if command.poll() is not None:
            raise RuntimeError(f"{module} ended with {command.returncode} before both workers had started")
        time.sleep(_LOOK_EVERY_S)
        used = tree.look()
    end_tree(command)
    return {"wall": max(map(float, times)) - started, "cpu": used - before}
