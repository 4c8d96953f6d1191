"""A run that asks for more workers than there is room for brings machines, if the cluster has an autoscaler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ray_head import DEADLINE_S, started_head


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_run_waits_for_the_machines_that_it_brings(images: Path, tmp_path: Path) -> None:
    more = {"ray.worker.default": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}}
    with started_head(tmp_path, more) as head:
        command = [sys.executable, "-m", "raytrain", "train", "custom", "--address", head.address, "--json"]
        data = ["--data", str(images), "--storage", str(tmp_path), "--model", "tests.integration.test_exact:network"]
        size = ["--image-size", "8", "8", "--batch-size", "20", "--learning-rate", "0.1", "--epochs", "1"]
        workers = ["--workers", "3", "--wait-for-machines-s", "300"]
        done = subprocess.run(
            [*command, *data, *size, *workers], env=dict(head.environment), capture_output=True, timeout=DEADLINE_S
        )
    assert done.returncode == 0, done.stderr.decode()
    assert "Waiting for machines: there is room for 2 of 3 workers" in done.stderr.decode()
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["status"], result["num_workers"]) == ("finished", 3)
