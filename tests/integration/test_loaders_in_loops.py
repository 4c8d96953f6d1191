"""A loop may read data of its own with a DataLoader, however the processes of that are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = """
import sys

from torch.utils.data import DataLoader, Dataset

from beside import Number
from tests.helpers.small_runs import loop_with


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Number(index)


class Batch:
    def __init__(self, numbers):
        self.numbers = numbers


def collate(numbers):
    return Batch([number.value for number in numbers])


def train(run):
    for context in ("spawn", "forkserver"):
        loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=context, collate_fn=collate)
        batches = list(loader)
        assert all(type(batch) is Batch for batch in batches)
        assert [batch.numbers for batch in batches] == [[0, 1], [2, 3]]
    loop_with(run, lambda run, batch: None)
"""
SCRIPT = """

if __name__ == "__main__":
    import raytrain
    from tests.helpers.small_runs import config

    options = dict(address="local") if sys.argv[1] == "ray" else dict(backend="local")
    raytrain.train(config(*sys.argv[2:], max_steps=2, workers=1, **options), loop=train)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a file", "the script"])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_classes_of_a_loop_are_known_in_processes_that_it_spawns(
    backend: str, place: str, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("class Number:\n    def __init__(self, value):\n        self.value = value\n")
    (tmp_path / "own.py").write_text(LOOP + SCRIPT)
    storage = str(tmp_path / "runs")
    command = [sys.executable, "own.py", backend, str(images), storage]
    if place == "a file":
        launch = ["--address", "local"] if backend == "ray" else ["--backend", "local"]
        command = [
            *(sys.executable, "-m", "raytrain", "train", "custom", "--data", str(images), "--storage", storage),
            *("--loop", "own.py:train", "--model", "tests.helpers.memory_runs:network", "--image-size", "12", "12"),
            *("--batch-size", "20", "--learning-rate", "0.05", "--max-steps", "2", "--workers", "1", *launch),
        ]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
