"""``ray job stop`` leaves a checkpoint if the job runs through ``uv run``, and ``--resume`` goes on from it.

``tests/integration/test_submit_to_a_cluster.py`` stops a job that runs without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain.demo.demo import render_digits
from raytrain.runs.records import read_run
from tests.helpers.ray_head import RAY, Head, started_head
from tests.helpers.waiting import DEADLINE_S, wait_for

pytestmark = pytest.mark.slow

PATIENT = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "240"}}
"""Ray kills a job 3 s after it asked it to stop, which is little on a busy machine."""
UV = ["uv", "run", "--no-sync", "--project", os.getcwd()]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with started_head(tmp_path_factory.mktemp("head")) as head:
        wait_for(lambda: ray_job(head, "list", "--address", head.dashboard).returncode == 0, "the head takes no jobs")
        yield head


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render_digits(tmp_path_factory.mktemp("digits"), num_images=200)


def ray_job(head: Head, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``ray job`` with these words."""
    command = [*RAY, "job", *words]
    return subprocess.run(command, env=head.environment, capture_output=True, text=True, timeout=DEADLINE_S)


def job(head: Head, *words: str) -> None:
    """Run ``ray job`` with these words, which must succeed."""
    done = ray_job(head, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def trains(storage: Path) -> bool:
    """Whether the run has a row of metrics."""
    return (storage / "run" / "metrics.jsonl").exists() and bool(read_run(str(storage), "run").metrics)


@pytest.mark.skipif(not shutil.which("uv"), reason="needs uv")
def test_a_stopped_job_has_a_checkpoint_and_resumes(head: Head, digits: Path, tmp_path: Path) -> None:
    train = ["python", "-m", "raytrain", "train", "digits", "--data", str(digits / "train"), "--storage", str(tmp_path)]
    words = [*UV, *train, "--name", "run", "--workers", "2"]
    submit = ["submit", "--address", head.dashboard, "--submission-id", "stopped", "--no-wait"]
    job(head, *submit, "--runtime-env-json", json.dumps(PATIENT), "--", *words, "--epochs", "100000")
    wait_for(lambda: trains(tmp_path), "the job does not train")
    job(head, "stop", "--address", head.dashboard, submit[4])
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (stopped["status"], stopped["stop_reason"]) == ("stopped", {"kind": "signal", "detail": "SIGTERM"})
    assert stopped["checkpoint"].endswith(f"step-{stopped['steps']:09d}.pt") and Path(stopped["checkpoint"]).exists()
    resume = [*words, "--resume", "--max-steps", str(stopped["steps"] + 5)]
    job(head, "submit", "--address", head.dashboard, "--", *resume)
    resumed = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (resumed["status"], resumed["steps"]) == ("finished", stopped["steps"] + 5)
