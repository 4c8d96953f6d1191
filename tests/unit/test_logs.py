"""What workers print is kept in the run's storage, without secrets, and shown line by line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.cli.main import main
from raytrain.display.run_tables import LogLines
from raytrain.runs.documents import CONFIG, run_store
from raytrain.runs.logs import LogCopies, LogFile, LogReader, StoredLog, log_name, worker_log

PRINTS = """
import os, sys
from raytrain.runs.documents import run_store
from raytrain.runs.logs import ProcessLog

print("before")
with ProcessLog(run_store(sys.argv[1], "first"), 1):
    print("hello", os.environ["MY_TOKEN"])
    os.system("echo from C")
    raise ValueError("no such class")
"""


@pytest.mark.not_quick
def test_what_a_worker_prints_is_kept_without_secrets_and_with_the_reason_of_its_failure(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as errors:
        script, environment = (
            [sys.executable, "-u", "-c", PRINTS, str(tmp_path)],
            {**os.environ, "MY_TOKEN": "secret-1"},
        )
        subprocess.run(script, env=environment, stdout=out, stderr=errors, check=False)
    by_stream = {log.stream: log.text for log in LogReader(run_store(str(tmp_path), "first"), worker_log(1)).read()}
    assert by_stream["out"] == "hello …\nfrom C\n"
    assert by_stream["err"].endswith("ValueError: no such class\n")
    assert not LogReader(run_store(str(tmp_path), "first"), worker_log(0)).read()


def test_a_log_that_grows_is_copied_as_a_whole_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain.runs.logs.MAX_LOG_BYTES", 8)
    store, file = run_store(str(tmp_path), "first"), tmp_path / "printed"
    name = log_name(worker_log(0), "1", "out")

    class Copies(LogCopies):
        def files(self) -> list[LogFile]:
            return [LogFile(file, name)]

    copies = Copies(store)
    for text in ("one\n", "one\ntwo\n", "one\ntwo\nthree\n"):
        file.write_text(text)
        copies.copy()
        assert LogReader(store, worker_log(0)).read() == [StoredLog("1", "out", text[-8:])]


def test_each_line_is_printed_once_below_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogLines(print)
    lines.printed("worker 0", [StoredLog("1", "out", "a\n 5%\r10%\nhalf")])
    lines.printed("worker 0", [StoredLog("1", "out", "a\n 5%\r10%\nhalf a line\n"), StoredLog("1", "err", "\x1b[2J\n")])
    lines.printed("worker 0", [StoredLog("1", "out", "10%\nhalf a line\nlast\n"), StoredLog("1", "err", "\x1b[2J\n")])
    assert capsys.readouterr().out.splitlines() == [
        "== worker 0, started 1, standard output",
        "a",
        "10%",
        "half a line",
        "== worker 0, started 1, standard error",
        "␛[2J",
        "== worker 0, started 1, standard output",
        "last",
    ]


def test_the_command_shows_the_log_of_one_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run_store(str(tmp_path), "first")
    store.put(CONFIG, b"{}")
    store.put("logs/" + log_name(worker_log(1), "20261122T120000", "out"), b"step 1\n")
    assert main(["logs", "first", "--worker", "1", "--storage", str(tmp_path)]) == 0
    assert "step 1" in capsys.readouterr().out
    assert main(["logs", "first", "--worker", "2", "--storage", str(tmp_path)]) == 0
    assert "There is nothing yet." in capsys.readouterr().out
