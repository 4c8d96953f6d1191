"""Sweeps with Optuna by the real command: killed and resumed, in a bucket, with several workers for each trial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytrain.experiments.sweep_plan import read_sweep
from raytrain.runs.documents import STUDY, run_store
from raytrain.runs.records import read_run
from tests.helpers.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def command(images: Path, storage: str, *words: str) -> list[str]:
    options = ["--data", str(images), "--image-size", "12", "--model", "tests.helpers.memory_runs:network"]
    options += ["--batch-size", "20", "--epochs", "2", "--backend", "local", "--workers", "2", "--name", "tried"]
    return [sys.executable, "-m", "raytrain", "sweep", "custom", *options, "--storage", storage, *words]


def has_started(storage: str, number: int) -> bool:
    return run_store(storage, f"tried-{number:02d}").exists("metrics.jsonl")


def test_a_sweep_in_a_bucket_that_is_killed_goes_on(s3: Any, images: Path, tmp_path: Path) -> None:
    storage, told = "s3://tests/optuna", tmp_path / "told"
    asked = ["--vary", "learning-rate=log:0.001..1", "--trials", "3", "--sampler", "tpe", "--pruner", "median"]
    with subprocess.Popen(
        command(images, storage, *asked), cwd=Path(__file__).parents[2], start_new_session=True
    ) as sweep:
        wait_for(lambda: has_started(storage, 1), deadline_s=300)
        os.kill(sweep.pid, signal.SIGKILL)
    points = read_sweep(run_store(storage, "tried")).points
    assert len(points) == 2 and run_store(storage, "tried").exists(STUDY)

    more = ["--resume", "--track", "tensorboard", "--notify", f'echo "$RAYTRAIN_TEXT" >> {told}', "--json"]
    done = subprocess.run(
        command(images, storage, *more), cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    resumed = read_sweep(run_store(storage, "tried"))
    assert resumed.points[:2] == points and len(resumed.points) == 3
    for number in range(3):
        record = read_run(storage, f"tried-{number:02d}")
        assert record.status.status in ("finished", "stopped")
        steps = [row.step for row in record.metrics if row.kind == "step"]
        assert steps == sorted(set(steps)), "nothing counts twice"
        assert record.summary["num_workers"] == 2
    assert told.read_text().startswith("Sweep tried finished: tried-0") and len(told.read_text().splitlines()) == 1
    shown = {found.path.split("/")[1] for found in run_store(storage, "tried").list("tensorboard")}
    assert "tried-02" in shown
