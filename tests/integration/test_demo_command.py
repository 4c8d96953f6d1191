"""The demo as a user runs it: what it reaches, what can be done afterwards, and what Ctrl-C leaves behind."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

DEADLINE_S = 500.0


class Command:
    """``raytrain`` in a folder and a process group of its own, and everything that it starts."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raytrain", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
        )

    def ctrl_c(self) -> None:
        """What the terminal does: every process of the group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ctrl_c_until_it_ends(self) -> None:
        """As somebody who is in a hurry; two at once would be one, for a pending signal is not counted."""
        while self.process.poll() is None:
            self.ctrl_c()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, once it has ended and nothing of it is left."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
            until(lambda: not list(self.started()))
        finally:
            for process in self.started():
                process.kill()
        return self.process.returncode, out, err

    def started(self) -> Iterator[psutil.Process]:
        """The processes that work in the folder: Ray's too, which hide their parents and their environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder):
                    yield process

    def runs(self, words: str) -> bool:
        """Whether a process whose command line contains ``words`` is among them."""
        with contextlib.suppress(psutil.Error):
            return any(words in " ".join(process.cmdline()) for process in self.started())
        return False


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def last_line(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder in which a demo has been run to its end, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    code, out, err = Command(folder, "demo", "--json").end()
    assert code == 0, err
    return folder, last_line(out)


@pytest.mark.timeout(1200)
def test_it_learns_the_digits(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    assert summary["status"] == "finished"
    assert summary["num_workers"] == 2
    assert summary["test_accuracy"] >= 0.97
    assert Path(summary["checkpoint"]).is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["demo-images", "runs"]


@pytest.mark.timeout(1200)
def test_its_model_can_be_used_after_its_server_has_gone(finished: tuple[Path, dict[str, Any]]) -> None:
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
def test_interrupts_at_any_moment_leave_no_process(moment: str, tmp_path: Path) -> None:
    command = Command(tmp_path, "demo")
    until(lambda: command.process.poll() is not None or MOMENTS[moment](command, tmp_path))
    command.ctrl_c_until_it_ends()
    code, _, err = command.end()
    assert code == 130
    assert err.strip().endswith("raytrain: aborted.")
    assert "Traceback" not in err


@pytest.mark.timeout(1200)
def test_one_interrupt_while_it_trains_stops_it_with_a_checkpoint(tmp_path: Path) -> None:
    command = Command(tmp_path, "demo", "--json")
    metrics = tmp_path / "runs/demo/metrics.jsonl"
    until(lambda: command.process.poll() is not None or (metrics.exists() and metrics.read_text()))
    command.ctrl_c()
    code, out, err = command.end()
    assert code == 0, err
    summary = last_line(out)
    assert summary["status"] == "stopped"
    assert 0 < summary["steps"] < 144
    assert Path(summary["checkpoint"]).is_file()
