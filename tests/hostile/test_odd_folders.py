"""Folders and files below ``--storage`` that are no runs, or damaged ones: they hide no other run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain.display.page.watched_runs import HomeRuns
from raytrain.errors import StorageError
from raytrain.runs.documents import CONFIG, METRICS, STATUS, SUMMARY, open_run, run_store
from raytrain.runs.records import list_runs
from tests.helpers.stored_histories import evaluation_row, store_run

NOBODY = 65534

# What lies beside the run "good", of which each may be a copy.
LEFT_OUT: dict[str, Callable[[Path, Path], Any]] = {
    "a copy by a file manager": lambda runs, good: shutil.copytree(good, runs / "good (copy)"),
    "a name of two lines": lambda runs, good: shutil.copytree(good, runs / "two\nlines"),
    "a name that is no text": lambda runs, good: shutil.copytree(good, os.fsdecode(bytes(runs) + b"/\xff\xfe")),
    "a name that a terminal obeys": lambda runs, good: shutil.copytree(good, runs / "\x1b[31mred"),
    "a link to itself": lambda runs, good: (runs / "loop").symlink_to("loop"),
    "options that are a link to themselves": lambda runs, good: _replaced(runs, good, CONFIG).symlink_to(CONFIG),
}
PASSED_OVER: dict[str, Callable[[Path, Path], Any]] = {
    "a file": lambda runs, good: (runs / "file").write_text("x"),
    "an empty folder": lambda runs, good: (runs / "empty").mkdir(),
    "a link to nothing": lambda runs, good: (runs / "broken").symlink_to("/nowhere/at/all"),
    "options that are a folder": lambda runs, good: _replaced(runs, good, CONFIG).mkdir(),
    "options that are a pipe": lambda runs, good: os.mkfifo(_replaced(runs, good, CONFIG)),
}
SHOWN: dict[str, Callable[[Path, Path], Any]] = {
    "half options": lambda runs, good: _replaced(runs, good, CONFIG).write_text("{"),
    "options of other types": lambda runs, good: _replaced(runs, good, CONFIG).write_text('{"model": 5, "epochs": {}}'),
    "no status": lambda runs, good: _replaced(runs, good, STATUS),
    "a status of other types": lambda runs, good: _replaced(runs, good, STATUS).write_text(
        '{"status": 7, "step": 1e400, "heartbeat_at": 12, "pid": 99999999999999999999}'
    ),
    "a status that is a folder": lambda runs, good: _replaced(runs, good, STATUS).mkdir(),
    "a status with a hole of terabytes": lambda runs, good: _with_hole(_replaced(runs, good, STATUS)),
    "a history with a hole of terabytes": lambda runs, good: _with_hole(_replaced(runs, good, METRICS)),
    "a summary of other types": lambda runs, good: _replaced(runs, good, SUMMARY).write_text(
        '{"validation_accuracy": NaN, "seconds": Infinity}'
    ),
    "a history that is a folder": lambda runs, good: _replaced(runs, good, METRICS).mkdir(),
    "a history that is a pipe": lambda runs, good: os.mkfifo(_replaced(runs, good, METRICS)),
    "a history of other types": lambda runs, good: _replaced(runs, good, METRICS).write_text(
        '[1]\n{"kind": "evaluation", "step": "x"}\n{"kind": "evaluation", "step": 1, "epoch": 1, "accuracy": NaN}\n'
    ),
    "a link to its own parent": lambda runs, good: (runs / "odd").symlink_to(".."),
}


def _replaced(runs: Path, good: Path, document: str) -> Path:
    """The place of a document that a copy of the run lacks."""
    copy = Path(shutil.copytree(good, runs / "odd"))
    (copy / document).unlink(missing_ok=True)
    return copy / document


def _with_hole(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**42)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    store_run(tmp_path / "runs", "good", [evaluation_row(1, accuracy=0.5)])
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "make", [*LEFT_OUT.values(), *PASSED_OVER.values(), *SHOWN.values()], ids=[*LEFT_OUT, *PASSED_OVER, *SHOWN]
)
def test_an_odd_folder_hides_no_run(runs: Path, make: Callable[[Path, Path], Any]) -> None:
    make(runs, runs / "good")
    with HomeRuns(str(runs)) as home:
        listed = home.all_runs()
        assert json.dumps(listed, allow_nan=False).isascii()  # a browser reads it
        assert "good" in [run["name"] for run in listed["runs"]]
        assert [run["measured"] for run in listed["runs"] if run["name"] == "good"] == [[0.5]]
        assert len(listed["left_out"]) == (make in LEFT_OUT.values())

        # Each run of the list can be opened, however damaged it is.
        for run in listed["runs"]:
            home.open(run["name"])
            home.documents(run["name"])
            home.machine_history(run["name"])


def test_the_command_lists_the_others_and_says_in_one_line_what_it_leaves_out(runs: Path) -> None:
    for make in LEFT_OUT.values():
        make(runs, runs / "good")
    command = [sys.executable, "-m", "raytrain", "runs", "--storage", str(runs)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "good" in listed.stdout and "Traceback" not in listed.stderr and "\x1b[31mred" not in listed.stderr
    assert listed.stderr.count("left out: ") == len(listed.stderr.splitlines()) == len(LEFT_OUT)


def as_nobody(runs: Path, is_as_expected: Callable[[], bool]) -> bool:
    """Call ``is_as_expected`` in a process of another user, who may enter the folder ``runs``; return its result."""
    for folder in (runs.parent, *runs.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        as_expected = False
        try:
            os.setuid(NOBODY)
            as_expected = is_as_expected()
        finally:
            os._exit(0 if as_expected else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, who may not read everything")
def test_a_folder_of_another_user_hides_no_run(runs: Path) -> None:
    (runs / "private").mkdir(mode=0o700)
    (runs / "private" / CONFIG).write_text("{}")

    def is_as_expected() -> bool:
        left_out: list[str] = []
        names = [run.name for run in list_runs(str(runs), left_out.append)]
        return names == ["good"] and len(left_out) == 1 and "no permission" in left_out[0]

    assert as_nobody(runs, is_as_expected)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, who may not read everything")
def test_a_run_of_another_user_is_not_said_to_be_missing(runs: Path) -> None:
    (runs / "private" / "checkpoints").mkdir(mode=0o755, parents=True)
    (runs / "private" / CONFIG).write_text("{}")
    (runs / "private").chmod(0o700)

    def is_as_expected() -> bool:
        with pytest.raises(StorageError, match=r"no permission for .*/private/config\.json; change the permissions"):
            open_run(str(runs), "private")
        with pytest.raises(StorageError, match=r"no permission for .*/private/checkpoints; change the permissions"):
            list(run_store(str(runs), "private").list("checkpoints"))
        return True

    assert as_nobody(runs, is_as_expected)
