"""Commands whose standard output takes only ASCII or Latin-1, as on old terminals and in cron: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.small_runs import make_images
from tests.helpers.stored_runs import make_run, options

COMMANDS = {
    "help": ["--help"],
    "help of a command": ["train", "custom", "--help-all"],
    "runs": ["runs", "--storage", "runs"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and a run whose note has letters of three alphabets."""
    folder = tmp_path_factory.mktemp("encoding")
    (folder / "images").mkdir()
    make_images(folder / "images", 30)
    make_run(folder / "runs", options(note="Löwe 狮子 done"))
    return folder


def printed(folder: Path, encoding: str, *command: str) -> str:
    """Return what a command in a fresh process prints to a standard output of ``encoding``; it has to succeed."""
    done = subprocess.run(
        [Path(sys.executable).with_name("raytrain"), *command],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"},
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode(encoding)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_ascii_is_printed_if_nothing_else_can_be(command: list[str], folder: Path) -> None:
    assert printed(folder, "ascii", *command).strip()


@pytest.mark.parametrize(("encoding", "note"), [("ascii", "L?we ?? done"), ("latin-1", "Löwe ?? done")])
def test_letters_that_cannot_be_printed_are_replaced(encoding: str, note: str, folder: Path) -> None:
    assert note in printed(folder, encoding, "show", "first", "--storage", "runs")


def test_training_prints_its_result(folder: Path) -> None:
    small = ["--name", "new", "--storage", "runs", "--image-size", "12", "--model", "raytrain.models:digits"]
    machine = ["--backend", "local", "--workers", "1", "--batch-size", "10", "--epochs", "1"]
    text = printed(folder, "ascii", "train", "custom", "--data", "images", *small, *machine)
    assert "finished" in text
