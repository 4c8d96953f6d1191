"""A current folder that has been removed is one sentence, in a script, and in a command that has begun already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.cli.main import main

GONE = "raytrain: The current folder is gone; change to another one.\n"

SCRIPT = """
import os
import sys

import raytrain
import torch

storage = sys.argv[1]
os.rmdir(os.getcwd())
config = raytrain.TrainConfig(data=storage, storage=storage, batch_size=8, image_size=12, workers=1)
local = raytrain.TrainConfig(data=storage, storage=storage, batch_size=8, image_size=12, workers=1, backend="local")
calls = {
    "train": lambda: raytrain.train(config),
    "train without Ray": lambda: raytrain.train(local),
    "start": lambda: raytrain.start(local),
    "find_rate": lambda: raytrain.find_rate(local),
    "sweep": lambda: raytrain.sweep(local, vary="seed=0,1"),
    "attach": lambda: raytrain.attach(local).__enter__(),
    "evaluate": lambda: raytrain.evaluate("run", storage=storage),
    "predict": lambda: raytrain.predict("run", ["photo.jpg"], storage=storage),
    "load": lambda: raytrain.load("run"),
    "pack": lambda: raytrain.pack("images", storage),
    "look": lambda: raytrain.look(local),
}
for name, call in calls.items():
    try:
        call()
    except raytrain.UsageError as error:
        print(name, "gone" if "The current folder is gone" in str(error) else error)
"""


@pytest.mark.not_quick
def test_each_call_in_a_script_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "../script.py", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, cwd=tmp_path / "gone", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert said == dict.fromkeys(said, "gone") and len(said) == 11, done.stdout


@pytest.mark.not_quick
def test_a_command_says_so_if_the_folder_is_removed_while_it_starts(tmp_path: Path) -> None:
    """It waits for its options here, from a pipe."""
    folder, options = tmp_path / "gone", tmp_path / "options.json"
    folder.mkdir()
    os.mkfifo(options)
    command = [sys.executable, "-m", "raytrain", "train", "custom", "--config", str(options)]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        with options.open("w") as file:  # once it has been opened to be read
            folder.rmdir()
            json.dump({"data": str(tmp_path), "storage": str(tmp_path), "backend": "local"}, file)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (2, GONE)


def test_a_command_that_fails_without_its_folder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: raytrain.TrainConfig, **options: Any) -> None:
        os.rmdir(os.getcwd())
        Path("relative").absolute()

    monkeypatch.setitem(vars(raytrain), "train", train)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "custom", "--data", "images"]) == 2
    assert capsys.readouterr().err == GONE
