"""Commands sent to a cluster that runs already, from a folder with a loop of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from raytrain.runs.records import read_run
from tests.helpers.ray_head import RAY, started_head
from tests.helpers.waiting import DEADLINE_S

LOOP = """
from pathlib import Path

import torch

import raytrain


def loop(run):
    network = run.prepare(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(network.parameters(), lr=0.1))
    if run.rank == 0:
        Path(run.config.storage, "started").write_text(raytrain.__file__)
    for epoch in run.epochs():
        for batch in epoch:
            loss = torch.nn.functional.cross_entropy(network(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_is_sent_by_submit_and_by_ray_and_rays_stop_keeps_a_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, storage = tmp_path / "project", tmp_path / "runs"
    project.mkdir()
    storage.mkdir()
    (project / "my_loop.py").write_text(LOOP)
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "120")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with started_head(tmp_path) as head:
        run = [
            "custom",
            "--data",
            str(images),
            "--storage",
            str(storage),
            "--loop",
            "my_loop.py:loop",
            "--workers",
            "1",
        ]
        size = ["--image-size", "8", "8", "--batch-size", "20", "--learning-rate", "0.1"]
        sent = [sys.executable, "-m", "raytrain", "submit", "--address", head.dashboard, "--json", "--", "train", *run]
        out = output([*sent, *size, "--name", "first", "--epochs", "1"], project, head.environment)
        assert json.loads(out.splitlines()[-1])["status"] == "succeeded"
        assert read_run(str(storage), "first").status.status == "finished"
        assert "/py_modules_files/" in (storage / "started").read_text()  # this machine's raytrain, not the head's

        (storage / "started").unlink()
        os.mkfifo(storage / "started")
        ray = [*RAY, "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--no-wait"]
        ray += ["--submission-id", "plain", "--", "raytrain", "train", *run, *size]
        output([*ray, "--name", "second", "--epochs", "1000000"], project, head.environment)
        (storage / "started").read_text()
        output([*RAY, "job", "stop", "--address", head.dashboard, "plain"], project, head.environment)
        second = read_run(str(storage), "second")
        assert (second.status.status, second.summary["stop_reason"]) == (
            "stopped",
            {"kind": "signal", "detail": "SIGTERM"},
        )
        assert second.summary["checkpoint"]


def output(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()
