"""Training under torchrun, without Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import raytrain
from raytrain.demo.digits import render_digits
from raytrain.runs.documents import run_store
from raytrain.runs.process_log import DRIVER, LogReader
from raytrain.runs.records import list_runs, read_run


def torchrun(
    data: Path, storage: Path, *options: str, meanwhile: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "raytrain",
        "train",
    ]
    what = [
        "digits",
        "--data",
        str(data / "train"),
        "--test-data",
        str(data / "test"),
        "--name",
        "run",
        "--storage",
        str(storage),
    ]
    words = [*launch, *what, "--epochs", "2", "--log-every", "1", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if meanwhile:
            meanwhile()
        output, errors = process.communicate(timeout=250)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


@pytest.mark.slow
def test_the_loop_trains_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(render_digits(tmp_path / "digits", num_images=200), tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples_seen"] for row in rows if row["kind"] == "step"] == [180, 360]
    assert [row["epoch"] for row in rows if row["kind"] == "evaluation"] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-000000002.pt").is_file()
    [listed] = list_runs(str(tmp_path))
    assert (listed.status.status, listed.status.step, listed.status.num_workers) == ("finished", 2, 2)
    assert listed.test_accuracy == [row["accuracy"] for row in rows if row["kind"] == "evaluation"][-1]


def test_a_run_under_torchrun_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    data = render_digits(tmp_path / "digits", num_images=200)
    until_stopped = partial(stop_when_it_trains, tmp_path)
    stopped = torchrun(data, tmp_path, "--epochs", "100000", "--track", "tensorboard", meanwhile=until_stopped)
    assert stopped.returncode == 0, stopped.stderr
    summary = read_run(str(tmp_path), "run").summary
    assert (summary["status"], summary["stop_reason"]) == ("stopped", "raytrain stop")
    assert summary["checkpoint"] == str(tmp_path / "run" / "checkpoints" / f"step-{summary['steps']:09d}.pt")
    finished = torchrun(data, tmp_path, "--resume", "--epochs", str(summary["steps"] + 1))
    assert finished.returncode == 0, finished.stderr
    assert read_run(str(tmp_path), "run").status.status == "finished"
    driver = [log.text for log in LogReader(run_store(str(tmp_path), "run"), DRIVER).read()]
    assert ["stop requested: raytrain stop" in text for text in driver] == [True, False], "one for each start"
    reader = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == list(range(1, summary["steps"] + 2))


def stop_when_it_trains(storage: Path) -> None:
    metrics = storage / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    raytrain.stop("run", storage=str(storage))


@pytest.mark.slow
def test_too_many_bad_images_end_a_run_under_torchrun_with_a_checkpoint(tmp_path: Path) -> None:
    data = render_digits(tmp_path / "digits", num_images=200)
    for digit in range(3):
        (data / "train" / str(digit) / "0001.png").write_bytes(b"this is not an image")
    done = torchrun(data, tmp_path)
    assert done.returncode == 1
    assert "raytrain: Run 'run' failed: 3 of 200 images (1.5 %) cannot be used, such as " in done.stderr, done.stderr
    skipped = [json.loads(line)["key"] for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert sorted(skipped) == ["0/0001.png", "1/0001.png", "2/0001.png"]
    assert (tmp_path / "run" / "checkpoints" / "step-000000001.pt").is_file()
    assert read_run(str(tmp_path), "run").status.status == "failed"
    done = torchrun(data, tmp_path, "--resume", "--max-bad-fraction", "0.02")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000000002.pt").is_file()
