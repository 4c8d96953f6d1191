"""The demo as a user runs it: its accuracy, the commands that follow it, and Ctrl-C."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.slow

DEADLINE_S = 500.0


class Command:
    """A ``raytrain`` command in its own folder and process group, with all processes that it starts."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raytrain", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # The parent may ignore it.
        )

    def ctrl_c(self) -> None:
        """Send SIGINT to every process of the group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ctrl_c_until_it_ends(self) -> None:
        """Press Ctrl-C once a second until the command ends. Simultaneous signals would be merged into one."""
        while self.process.poll() is None:
            self.ctrl_c()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)

    def end(self) -> tuple[int, str, str]:
        """Wait until all processes have ended; return the exit code, standard output and standard error."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
            wait_for(lambda: not list(self.started()))
        finally:
            for process in self.started():
                process.kill()
        return self.process.returncode, out, err

    def started(self) -> Iterator[psutil.Process]:
        """Yield the processes whose working folder is the command's: Ray's hide their parents and environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder):
                    yield process

    def runs(self, words: str) -> bool:
        """Return whether a process of the command has ``words`` in its command line."""
        with contextlib.suppress(psutil.Error):
            return any(words in " ".join(process.cmdline()) for process in self.started())
        return False


def last_line(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a finished demo, and its summary."""
    folder = tmp_path_factory.mktemp("demo")
    code, out, err = Command(folder, "demo", "--json").end()
    assert code == 0, err
    return folder, last_line(out)


@pytest.mark.timeout(1200)
def test_the_demo_learns_the_digits(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    assert summary["status"] == "finished"
    assert summary["num_workers"] == 2
    assert summary["validation_accuracy"] >= 0.97
    assert Path(summary["checkpoint"]).is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["demo-images", "runs"]


@pytest.mark.timeout(1200)
def test_the_model_of_the_demo_can_be_used_after_its_server_has_ended(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    code, out, err = Command(folder, "evaluate", "demo", "--data", "demo-images/test", "--json").end()
    assert code == 0, err
    assert last_line(out)["images"] == 500
    assert last_line(out)["accuracy"] >= 0.97
    code, _, err = Command(folder, "predict", "demo", "--data", "demo-images/test", "--output", "predictions.csv").end()
    assert code == 0, err
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500
    assert sum(row["key"].split("/")[0] == row["label"] for row in rows) >= 0.97 * 500
    code, out, err = Command(folder, "show", "demo").end()
    assert code == 0, err
    assert "finished" in out


MOMENTS: dict[str, Callable[[Command, Path], bool]] = {
    "drawing": lambda command, folder: (folder / "demo-images/train/3").exists(),
    "serving": lambda command, folder: command.runs("serve s3"),
    "starting Ray": lambda command, folder: command.runs("gcs_server"),
    "starting the run": lambda command, folder: (folder / "runs/demo/config.json").exists(),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("moment", MOMENTS)
def test_repeated_ctrl_c_at_any_moment_leaves_no_process(moment: str, tmp_path: Path) -> None:
    command = Command(tmp_path, "demo")
    wait_for(lambda: command.process.poll() is not None or MOMENTS[moment](command, tmp_path))
    command.ctrl_c_until_it_ends()
    code, _, err = command.end()
    assert code == 130
    assert err.strip().endswith("raytrain: aborted.")
    assert "Traceback" not in err


@pytest.mark.timeout(1200)
def test_one_ctrl_c_during_training_stops_the_demo_with_a_checkpoint(tmp_path: Path) -> None:
    command = Command(tmp_path, "demo", "--json")
    metrics = tmp_path / "runs/demo/metrics.jsonl"
    wait_for(lambda: command.process.poll() is not None or (metrics.exists() and metrics.read_text()))
    command.ctrl_c()
    code, out, err = command.end()
    assert code == 0, err
    summary = last_line(out)
    assert summary["status"] == "stopped"
    assert 0 < summary["steps"] < 144
    assert Path(summary["checkpoint"]).is_file()
