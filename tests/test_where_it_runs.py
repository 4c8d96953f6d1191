"""On a cluster that somebody started: found without being named, and through a submitted job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain.digits import render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 400.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """``ray start --head`` on this machine; the environment in which commands find it, with the dashboard's address."""
    dashboard, gcs, agent = free_port(), free_port(), free_port()  # another cluster on this machine may have the usual ones
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "PYTHONPATH": os.getcwd()}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=2", "--block", "--disable-usage-stats"]
    log = (tmp_path_factory.mktemp("head") / "log").open("w")
    process = subprocess.Popen(
        [*ray, f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"],
        env=environment,
        stdout=log,
        stderr=log,
    )
    try:
        wait_for_port(dashboard)
        yield {**environment, "DASHBOARD": f"http://127.0.0.1:{dashboard}"}
    finally:
        process.terminate()
        process.wait(60)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(tmp_path_factory.mktemp("digits"), num_images=200)


def words(digits: Path, storage: Path, name: str) -> list[str]:
    options = ["--data", str(digits / "train"), "--storage", str(storage), "--name", name, "--workers", "2", "--epochs", "1", "--json"]
    return [sys.executable, "-m", "raytrain", "train", "digits", *options]


def test_a_head_on_this_machine_is_found(head: dict[str, str], digits: Path, tmp_path: Path) -> None:
    done = subprocess.run(words(digits, tmp_path, "found"), env=head, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "finished"


def test_a_job_is_submitted(head: dict[str, str], digits: Path, tmp_path: Path) -> None:
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head["DASHBOARD"], "--"]
    done = subprocess.run([*submit, *words(digits, tmp_path, "job")], env=head, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "job" / "summary.json").read_text())
    assert (summary["status"], summary["num_workers"]) == ("finished", 2)
