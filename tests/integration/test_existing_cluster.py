"""Training on a cluster of this machine that ``ray start`` has started: a command finds it without an address."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.ray_head import started_head
from tests.helpers.waiting import DEADLINE_S, wait_for


@pytest.mark.slow
def test_a_cluster_on_this_machine_is_found(images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raytrain", "train", "custom", "--data", str(images), "--storage", str(tmp_path)]
    command += ["--model", "tests.helpers.memory_runs:network", "--image-size", "12", "12", "--batch-size", "20"]
    command += ["--learning-rate", "0.05", "--workers", "2", "--epochs", "1", "--json"]
    with started_head(tmp_path) as head:
        done = subprocess.run(
            command, env=dict(head.environment), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "finished"
    port = head.address.rpartition(":")[2]
    assert re.search(rf"Joining the Ray that runs on this machine, \S+:{port}; ", done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_cluster_that_listens_on_the_loopback_interface_alone_is_joined(host: str, tmp_path: Path) -> None:
    with started_head(tmp_path, "--node-ip-address=127.0.0.1") as head:
        address = head.address.replace("127.0.0.1", host)
        command = [sys.executable, "-m", "raytrain", "devices", "--address", address, "--json"]
        done = subprocess.run(
            command, env=dict(head.environment), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == 0, done.stderr
    [node] = json.loads(done.stdout)["nodes"]
    assert node["cpus"] == 2


@pytest.mark.slow
def test_a_raylet_that_dies_while_a_run_starts_on_a_cluster_is_reported(images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raytrain", "train", "custom", "--data", str(images), "--storage", str(tmp_path)]
    command += ["--model", "tests.helpers.memory_runs:network", "--image-size", "12", "12", "--batch-size", "20"]
    command += ["--learning-rate", "0.05", "--workers", "2", "--epochs", "1000"]
    errors = tmp_path / "errors"
    with started_head(tmp_path) as head, errors.open("w") as output:
        command += ["--address", head.address]
        with subprocess.Popen(command, env=dict(head.environment), stdout=output, stderr=output) as run:
            wait_for(lambda: "starting the workers" in errors.read_text(), "the run does not start")
            [raylet] = [each for each in psutil.Process(head.process.pid).children(True) if each.name() == "raylet"]
            raylet.kill()
            # A call of Ray may then wait for the head, which `ray start --block` ends, too.
            wait_for(lambda: "the raylet, has died" in errors.read_text(), "nothing is said")
            run.kill()
