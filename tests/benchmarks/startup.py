"""Start-up time: raytrain until its first optimizer step, compared with a bare TorchTrainer until its empty loop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from raytrain.backends.ray.lean_imports import lean
from tests.benchmarks.process_tree import CpuOfTree, end_tree
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.benchmarks.started import NOTES

_OPTIONS = ["--test-fraction", "0.001", "--workers", "2", "--device", "cpu", "--epochs", "2"]
_TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
_KINDS = "wall", "cpu"
_LOOK_EVERY_S = 0.2
_IDLE_FRACTION = 0.2  # of a core


def measure(bench: Bench) -> Report:
    train = ["raytrain", "train", "cifar10", "--data", bench.url, "--name", "run"]
    train += ["--model", "tests.benchmarks.started:network", *_OPTIONS]
    bare_loop = "bare TorchTrainer, loop entered"
    commands = {
        bare_loop: ["tests.benchmarks.bare"],
        "raytrain train cifar10, first step done": train,
        "the same with --backend local": [*train, "--backend", "local"],
        "the same under torchrun": [*_TORCHRUN, *train],
    }
    sides = {name: Side(start_up, {"module": command}) for name, command in commands.items()}
    sides["the same after raytrain up"] = Side(start_up_warm, {"module": train})
    sides[f"{bare_loop}, without the grammar that JupyterLab brings"] = Side(
        start_up, {"module": commands[bare_loop], "without_grammar": True}
    )
    results = bench.alternate(sides, bench.scaled(3), "{0[wall]:.1f} s, {0[cpu]:.1f} s of a core".format)
    wall, cpu = (
        [Figure(name, "s", [each[kind] for each in values]) for name, values in results.items()] for kind in _KINDS
    )
    bare, ray, local, torchrun, warm, lean_bare = (figure.median for figure in wall)
    bare_cpu, ray_cpu, *_, lean_bare_cpu = (figure.median for figure in cpu)
    checks = [
        Check("raytrain : bare", ray / bare, at_most=0.4),
        Check("raytrain : bare, seconds of a core", ray_cpu / bare_cpu, at_most=0.4),
        Check("raytrain : bare without the grammar", ray / lean_bare, at_most=0.6),
        Check("raytrain : bare without the grammar, seconds of a core", ray_cpu / lean_bare_cpu, at_most=0.6),
        Check("after raytrain up : bare", warm / bare, at_most=0.35),
        Check("--backend local : raytrain", local / ray, at_most=1.0),
        Check("--backend local : torchrun", local / torchrun, at_most=0.8),
    ]
    figures = wall + [replace(figure, name=f"{figure.name}, all cores together") for figure in cpu]
    return Report("startup: seconds after the start of the process, on both workers", figures, checks)


def start_up_warm(module: list[str], folder: str) -> dict[str, float]:
    """The same on the Ray that ``raytrain up`` keeps, without what that command takes."""
    from raytrain.backends.ray.warm_cluster import end, keep_warm

    os.environ.update({NOTES: str(Path(folder, "notes")), "HOME": folder})
    kept = keep_warm(60)
    _wait_until_idle(kept.pid)
    took = start_up(module, folder, kept=kept.pid)
    end(kept)
    return took


def _wait_until_idle(pid: int) -> None:
    """Wait until the processes below ``pid`` use no core: one of them imports what all of a run need."""
    tree, used = CpuOfTree(pid), float("-inf")
    while (now := tree.look()) - used > _IDLE_FRACTION:
        used = now
        time.sleep(1.0)


def start_up(
    module: list[str], folder: str, *, without_grammar: bool = False, kept: int | None = None
) -> dict[str, float]:
    """End the command as soon as both workers have noted their start; ``without_grammar``: see ``lean_imports.py``.

    ``kept`` is a process whose descendants work for the command, too.

    Returns the seconds until then (``wall``), and those of a core that its processes took (``cpu``).
    """
    notes = Path(folder, "notes")
    notes.touch()
    started = time.time()
    environment = (lean(os.environ) if without_grammar else dict(os.environ)) | {NOTES: str(notes)}
    command = subprocess.Popen([sys.executable, "-m", *module], env=environment, cwd=folder)
    trees = [CpuOfTree(pid) for pid in (command.pid, kept) if pid is not None]
    used = before = sum(tree.look() for tree in trees)
    while len(times := notes.read_text().split()) < 2:
        if command.poll() is not None:
            raise RuntimeError(f"{module} ended with {command.returncode} before both workers had started")
        time.sleep(_LOOK_EVERY_S)
        used = sum(tree.look() for tree in trees)
    end_tree(command)
    return {"wall": max(map(float, times)) - started, "cpu": used - before}
