"""Training on a cluster that is already running: found without an address, and as a submitted job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain.demo.demo import render_digits
from tests.helpers.ray_head import RAY, Head, started_head
from tests.helpers.waiting import DEADLINE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with started_head(tmp_path_factory.mktemp("head")) as head:
        yield head


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render_digits(tmp_path_factory.mktemp("digits"), num_images=200)


def words(digits: Path, storage: Path, name: str) -> list[str]:
    options = [
        "--data",
        str(digits / "train"),
        "--storage",
        str(storage),
        "--name",
        name,
        "--workers",
        "2",
        "--epochs",
        "1",
        "--json",
    ]
    return [sys.executable, "-m", "raytrain", "train", "digits", *options]


def test_a_cluster_on_this_machine_is_found(head: Head, digits: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        words(digits, tmp_path, "found"), env=head.environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "finished"


def test_a_run_can_be_submitted_as_a_job(head: Head, digits: Path, tmp_path: Path) -> None:
    submit = [*RAY, "job", "submit", "--address", head.dashboard, "--"]
    done = subprocess.run(
        [*submit, *words(digits, tmp_path, "job")],
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "job" / "summary.json").read_text())
    assert (summary["status"], summary["num_workers"]) == ("finished", 2)
