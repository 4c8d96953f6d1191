"""Start-up time: raytrain until its first optimizer step, compared with a bare TorchTrainer until its empty loop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from raytrain.launch.ray.find_cluster import ray_start_address
from raytrain.launch.ray.own_cluster import lean
from raytrain.launch.ray.private_api import CURRENT_CLUSTER_FILE
from tests.benchmarks.process_tree import CpuOfTree, end_tree
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.benchmarks.started import NOTES
from tests.helpers.waiting import wait_for

_OPTIONS = ["--validation-fraction", "0.001", "--workers", "2", "--device", "cpu", "--epochs", "2"]
_HEAD = ["ray.scripts.scripts", "start", "--head", "--port", "0", "--block"]
_KINDS = "wall", "cpu"
_LOOK_EVERY_S = 0.2
_IDLE_FRACTION = 0.2  # of a core


def measure(bench: Bench) -> Report:
    train = ["raytrain", "train", "cifar10", "--data", bench.url, "--name", "run"]
    train += ["--model", "tests.benchmarks.started:network", *_OPTIONS]
    bare, ours = "bare TorchTrainer, loop entered", "raytrain train cifar10, first step done"
    grammar, local = f"{bare}, without the grammar that JupyterLab brings", "the same with --backend local"
    joined_bare, joined = f"{bare}, on a Ray that runs", f"{ours}, on a Ray that runs"
    sides = {
        bare: Side(start_up, {"module": ["tests.benchmarks.bare"]}),
        ours: Side(start_up, {"module": train}),
        local: Side(start_up, {"module": [*train, "--backend", "local"]}),
        grammar: Side(start_up, {"module": ["tests.benchmarks.bare"], "without_grammar": True}),
        joined_bare: Side(start_up_joined, {"module": ["tests.benchmarks.bare"]}),
        joined: Side(start_up_joined, {"module": train}),
    }
    results = bench.alternate(sides, bench.scaled(3), "{0[wall]:.1f} s, {0[cpu]:.1f} s of a core".format)
    wall, cpu = (
        {name: Figure(name, "s", [each[kind] for each in values]) for name, values in results.items()}
        for kind in _KINDS
    )

    def ratio(name: str, divisor: str, figures: dict[str, Figure] = wall) -> float:
        return figures[name].median / figures[divisor].median

    checks = [
        Check("raytrain : bare", ratio(ours, bare), at_most=0.4),
        Check("raytrain : bare, seconds of a core", ratio(ours, bare, cpu), at_most=0.4),
        Check("raytrain : bare without the grammar", ratio(ours, grammar), at_most=0.6),
        Check("raytrain : bare without the grammar, seconds of a core", ratio(ours, grammar, cpu), at_most=0.6),
        Check("raytrain : bare, on a Ray that runs", ratio(joined, joined_bare), at_most=0.5),
        Check("--backend local : raytrain", ratio(local, ours), at_most=1.0),
    ]
    figures = [*wall.values(), *(replace(each, name=f"{name}, all cores together") for name, each in cpu.items())]
    return Report("startup: seconds after the start of the process, on both workers", figures, checks)


def start_up_joined(module: list[str], folder: str) -> dict[str, float]:
    """The same on a Ray that ``ray start --head`` started, without what that takes."""
    with _head({**os.environ, NOTES: str(Path(folder, "notes"))}) as head:
        return start_up(module, folder, head=head)


@contextmanager
def _head(environment: dict[str, str]) -> Iterator[int]:
    """The process of a Ray that is up and idle as long as the ``with`` block lasts."""
    with subprocess.Popen([sys.executable, "-m", *_HEAD], env=environment) as head:
        try:
            wait_for(lambda: ray_start_address() is not None or head.poll() is not None)
            if head.returncode is not None:
                raise RuntimeError(f"ray start ended with {head.returncode}, see above")
            _wait_until_idle(head.pid)
            yield head.pid
        finally:
            end_tree(head)
            # Otherwise a plain ray.init() would wait for the head that has ended.
            Path(environment["RAY_TMPDIR"], "ray", CURRENT_CLUSTER_FILE).unlink(missing_ok=True)


def _wait_until_idle(pid: int) -> None:
    """Wait until the processes below ``pid`` use next to no core."""
    tree, used = CpuOfTree(pid), float("-inf")
    while (now := tree.look()) - used > _IDLE_FRACTION:
        used = now
        time.sleep(1.0)  # the use is that of a second


def start_up(
    module: list[str], folder: str, *, without_grammar: bool = False, head: int | None = None
) -> dict[str, float]:
    """End the command as soon as both workers have noted their start; ``without_grammar``: see ``lean_imports.py``.

    ``head`` is a process whose descendants work for the command, too.

    Returns the seconds until then (``wall``), and those of a core that its processes took (``cpu``).
    """
    notes = Path(folder, "notes")
    notes.touch()
    started = time.time()
    environment = (lean(os.environ) if without_grammar else dict(os.environ)) | {NOTES: str(notes)}
    command = subprocess.Popen([sys.executable, "-m", *module], env=environment, cwd=folder)
    trees = [CpuOfTree(pid) for pid in (command.pid, head) if pid is not None]
    used = before = sum(tree.look() for tree in trees)
    while len(times := notes.read_text().split()) < 2:
        if command.poll() is not None:
            raise RuntimeError(f"{module} ended with {command.returncode} before both workers had started")
        time.sleep(_LOOK_EVERY_S)  # until the next sample of the use
        used = sum(tree.look() for tree in trees)
    end_tree(command)
    return {"wall": max(map(float, times)) - started, "cpu": used - before}
