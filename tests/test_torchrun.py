from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from raytrain.digits import render


def torchrun(data: Path, storage: Path, *options: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "raytrain.torchrun"]
    what = ["digits", "--data", str(data / "train"), "--test-data", str(data / "test"), "--name", "run", "--storage", str(storage)]
    return subprocess.run([*launch, *what, "--epochs", "2", "--log-every", "1", *options], capture_output=True, text=True, timeout=250)


def test_the_loop_trains_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(render(tmp_path / "digits", num_images=200), tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples_seen"] for row in rows if row["kind"] == "step"] == [180, 360]
    assert [row["epoch"] for row in rows if row["kind"] == "evaluation"] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-000000002.pt").is_file()


def test_too_many_bad_images_end_it_with_a_checkpoint(tmp_path: Path) -> None:
    data = render(tmp_path / "digits", num_images=200)
    for digit in range(3):
        (data / "train" / str(digit) / "0001.png").write_bytes(b"this is no image")
    done = torchrun(data, tmp_path)
    assert done.returncode == 1
    assert "raytrain: Run 'run' failed: 3 of 200 images (1.5 %) cannot be used, such as " in done.stderr, done.stderr
    skipped = [json.loads(line)["key"] for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert sorted(skipped) == ["0/0001.png", "1/0001.png", "2/0001.png"]
    assert (tmp_path / "run" / "checkpoints" / "step-000000001.pt").is_file()
    done = torchrun(data, tmp_path, "--resume", "--max-bad-fraction", "0.02")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000000002.pt").is_file()
