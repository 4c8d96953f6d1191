"""The suite for a GPU, on the CPU: it writes what each part has found, and goes on whatever happens to one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.gpu.__main__ import Part, run_all
from tests.gpu.trial import Trial

pytestmark = pytest.mark.slow

_HERE = "tests.integration.test_gpu_suite"


def holds(trial: Trial) -> None:
    trial.figure("a figure", "ms", 1.0, float("nan"))
    trial.figure("nothing measured", "ms")
    trial.holds("something", True)


def does_not_hold(trial: Trial) -> None:
    trial.check("a difference", 0.2, "", at_most=0.1)


def raises(trial: Trial) -> None:
    trial.says("before it broke")
    raise RuntimeError("of this reason")


def is_killed(trial: Trial) -> None:
    os.abort()


def hangs(trial: Trial) -> None:
    trial.says("before it hung")
    threading.Event().wait()


def test_a_part_that_breaks_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    functions = (hangs, is_killed, raises, does_not_hold, holds)
    parts = [Part(each.__name__, f"{_HERE}:{each.__name__}", 15 if each is hangs else 90) for each in functions]
    parts.append(Part("on a GPU", f"{_HERE}:holds", 90, needs="a GPU"))
    outcomes = {outcome.part.name: outcome for outcome in run_all(parts, "cpu", tmp_path, 600, None)}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "hangs": "out of time",
        "is_killed": "broke",
        "raises": "broke",
        "does_not_hold": "failed",
        "holds": "passed",
        "on a GPU": "left out",
    }
    assert outcomes["hangs"].sentences == ["before it hung"]
    assert "SIGABRT" in outcomes["is_killed"].output and "RuntimeError: of this reason" in outcomes["raises"].output
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["parts"]["holds"]["figures"][0]["values"] == [1.0, "nan"]
    page = (tmp_path / "gpu.txt").read_text()
    assert all(f"== {name}: " in page for name in outcomes) and "it needs a GPU" in page


def test_the_command_runs_on_a_machine_without_a_gpu_and_without_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray here')")
    chosen = ["bit for bit", "what the host waits for", "commands"]
    command = [sys.executable, "-m", "tests.gpu", str(tmp_path), "--device", "cpu", "--parts", *chosen]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu.txt").read_text()
    assert "No GPU is used" in done.stdout
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses == dict.fromkeys(chosen, "passed")
