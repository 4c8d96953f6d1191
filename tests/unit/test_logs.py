"""What workers print is kept in the run's storage, without secrets, and shown line by line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.cli.main import main
from raytrain.display.log_lines import LogLines
from raytrain.errors import StorageError, shell_command
from raytrain.runs import logs
from raytrain.runs.documents import CONFIG, SWEEP, run_store, write_json
from raytrain.runs.logs import (
    MAX_LINE,
    LogCopies,
    LogFile,
    LogReader,
    LogText,
    PrintedLine,
    StoredLog,
    log_name,
    worker_log,
)
from raytrain.runs.redact import redact
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.folder import FolderStore

PRINTS = """
import os, sys
from raytrain.runs.documents import run_store
from raytrain.runs.logs import ProcessLog

print("before")
def show(lines):
    for line in lines:
        print(line, file=shown)

shown = open(sys.argv[2], "w", buffering=1)
with ProcessLog(run_store(sys.argv[1], "first"), 1, show):
    print("hello", os.environ["MY_TOKEN"])
    os.system("echo from C")
    raise ValueError("no such class")
"""


@pytest.mark.not_quick
def test_what_a_worker_prints_is_kept_without_secrets_and_with_the_reason_of_its_failure(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as errors:
        script, environment = (
            [sys.executable, "-u", "-c", PRINTS, str(tmp_path), str(tmp_path / "shown")],
            {**os.environ, "MY_TOKEN": "secret-1"},
        )
        subprocess.run(script, env=environment, stdout=out, stderr=errors, check=False)
    by_stream = {log.stream: log.text for log in LogReader(run_store(str(tmp_path), "first"), worker_log(1)).read()}
    assert by_stream["out"] == "hello …\nfrom C\n"
    assert by_stream["err"].endswith("ValueError: no such class\n")
    assert not LogReader(run_store(str(tmp_path), "first"), worker_log(0)).read()
    shown = (tmp_path / "shown").read_text()
    assert "'hello …'" in shown and "'from C'" in shown and "ValueError" not in shown


REPLACES_STREAMS = """
import os, sys
from raytrain.launch.script_end import ends_as_a_script
from raytrain.runs.logs import PrintedLine, ProcessLog, print_line

class Writer:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)

with ProcessLog(None, 0), ends_as_a_script():
    sys.stdout, sys.stderr = Writer(sys.stdout), open(os.devnull)
    sys.stderr.close()
    print("step 1")
print_line(PrintedLine(0, "out", "step 2"))
sys.stdout = sys.__stdout__  # Python itself flushes it at its end
"""


@pytest.mark.not_quick
def test_scripts_may_close_their_streams_or_replace_them_by_objects_that_can_only_write() -> None:
    script = [sys.executable, "-c", REPLACES_STREAMS]
    assert subprocess.run(script, stdout=subprocess.PIPE, check=True).stdout == b"step 1\n[worker0]:step 2\n"


def test_a_log_that_grows_is_copied_as_a_whole_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 8)  # the real limit, 8 MiB, would hide which bytes are kept
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


def test_of_a_long_line_the_beginning_is_copied_and_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-" * 500)
    whole, long = "a" * (MAX_LINE + 1000), "b" * 1_000_000
    log = LogText()
    for line in (whole, long, ("secret-" * 500).join(["c" * (MAX_LINE + 15_000)] * 3), " 5%"):
        for start in range(0, len(line), 77_777):
            log.add(line[start : start + 77_777])
        log.add("\r" if line == long else "\n")
    first, second, third, last = re.split("[\r\n]", log.content().decode())[:-1]
    assert (first, last) == (whole, " 5%")
    assert second == "b" * MAX_LINE + "… (of a line of 1,000,000 characters, at most 16,384 are copied)"
    assert third == "c" * MAX_LINE + "… (of a line of 101,152 characters, at most 16,384 are copied)"


def test_a_line_that_has_not_ended_is_copied_as_far_as_it_goes() -> None:
    log = LogText()
    log.add("one\ntw")
    assert log.content() == b"one\ntw"
    log.add("o" * 100_000)
    assert log.content().endswith("o… (of a line of 100,002 characters, at most 16,384 are copied)".encode())
    log.add("\nthree\n")
    assert log.content().endswith(b" are copied)\nthree\n")


@pytest.mark.parametrize("length", [1, 7, 1000, 50_000, 10**7])
def test_secrets_are_found_wherever_a_log_was_cut_when_it_was_read(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setenv("MY_TOKEN", "first line of it\nsecond line of it\nthird line of it")
    key = "-----BEGIN PRIVATE KEY-----\n" + "0123456789abcdef\n" * 100 + "-----END PRIVATE KEY-----\n"
    filler = "step 1 loss 0.5 postgres://me:hunter22@host/db\n" * (20 if length < 1000 else 2000)
    text = "".join([filler, os.environ["MY_TOKEN"], "\n", filler, key, filler])
    log = LogText()
    for start in range(0, len(text), length):
        log.add(text[start : start + length])
    assert log.content().decode() == redact(text)


def test_only_what_is_new_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, file, redacted = run_store(str(tmp_path), "first"), tmp_path / "printed", list[int]()

    class Copies(LogCopies):
        def files(self) -> list[LogFile]:
            return [LogFile(file, "worker-0-1.out")]

    def counted(text: str) -> str:
        redacted.append(len(text))
        return text

    # How much is redacted at a time is seen by nobody but by the threads that it would stop.
    monkeypatch.setattr(logs, "redact", counted)
    copies, text = Copies(store), "step 1 loss 0.5\n" * 200_000
    file.write_text(text)
    copies.copy()
    assert max(redacted) < 300_000  # at once: Python's lock is held meanwhile
    redacted.clear()
    with file.open("a") as appended:
        appended.write("step 2\n")
    copies.copy()
    assert sum(redacted) < 200_000
    copies.copy()
    assert LogReader(store, worker_log(0)).read()[0].text == text + "step 2\n"


def test_a_copy_that_storage_has_not_taken_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, file = run_store(str(tmp_path), "first"), tmp_path / "printed"
    file.write_text("one\n")

    class Copies(LogCopies):
        def files(self) -> list[LogFile]:
            return [LogFile(file, "worker-0-1.out")]

    def fail(*_: object) -> None:
        raise StorageError("out of reach")

    copies = Copies(store)
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "put", fail)
        copies.copy()
    assert not LogReader(store, worker_log(0)).read()
    copies.copy()
    assert LogReader(store, worker_log(0)).read()[0].text == "one\n"


def test_lines_are_shown_once_they_have_ended_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-1")
    file, lines = tmp_path / "printed", list[PrintedLine]()

    class Copies(LogCopies):
        def files(self) -> list[LogFile]:
            return [LogFile(file, "worker-3-1.err")]

    def shown() -> list[str]:
        texts = [line.text for line in lines]
        assert all((line.rank, line.stream) == (3, "err") for line in lines)
        lines.clear()
        return texts

    copies = Copies(run_store(str(tmp_path), "first"), show=lines.extend)
    with file.open("a") as printed:
        for text, expected in {
            "one\n\nha": ["one"],
            "lf\nMY_TOKEN secret-1\n": ["half", "MY_TOKEN …"],
            "\r 5%\r10%": [],
            "\r100%\n\x1b[2Jend of line\r\n": ["100%", "␛[2Jend of line"],
            "line\n" * 1234: [
                "… 1,034 lines are left out here; `raytrain logs RUN --worker 3` has them",
                *["line"] * 200,
            ],
            "no end": [],
        }.items():
            printed.write(text)
            printed.flush()
            copies.read()
            assert shown() == expected
        copies.show_rest()
        assert shown() == ["no end"]
        printed.write("\ntoo late\n")
        printed.flush()
        copies.copy()
        assert shown() == []
        assert LogReader(run_store(str(tmp_path), "first"), worker_log(3)).read()[0].text.endswith("too late\n")


def test_each_line_is_printed_once_below_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogLines(print)
    error = StoredLog("1", "err", "\x1b[2J\n")
    lines.print_process("worker 0", [StoredLog("1", "out", "a\n 5%\r10%\nhalf")], grows=True)
    lines.print_process("worker 0", [StoredLog("1", "out", "a\n 5%\r10%\nhalf a line\n"), error], grows=True)
    lines.print_process("worker 0", [StoredLog("1", "out", "10%\nhalf a line\nlast\n"), error], grows=True)
    lines.print_process("worker 0", [StoredLog("1", "out", "last\n40%\r50%\r"), error], grows=False)
    assert capsys.readouterr().out.splitlines() == [
        "== worker 0, started 1, standard output",
        "a",
        "10%",
        "half a line",
        "== worker 0, started 1, standard error",
        "␛[2J",
        "== worker 0, started 1, standard output",
        "last",
        "50%",
    ]


def test_the_command_shows_the_log_of_one_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run_store(str(tmp_path), "first")
    store.put(CONFIG, b"{}")
    store.put("logs/" + log_name(worker_log(1), "20261122T120000", "out"), b"step 1\nstep 2")
    assert main(["logs", "first", "--worker", "1", "--storage", str(tmp_path)]) == 0
    assert "step 1\nstep 2\n" in capsys.readouterr().out
    assert main(["logs", "first", "--worker", "2", "--storage", str(tmp_path)]) == 0
    assert "There is nothing yet." in capsys.readouterr().out
    write_status(store, RunStatus(status="finished", num_workers=2))
    assert main(["logs", "first", "--worker", "2", "--storage", str(tmp_path)]) == 2
    assert "--worker is 2, and run 'first' has 2 workers, counted from 0." in capsys.readouterr().err
    assert main(["logs", "first", "--worker", "-1", "--storage", str(tmp_path)]) == 2
    assert main(["logs", "first", "--worker", "0", "--storage", str(tmp_path)]) == 0
    assert "worker 0 has printed nothing, and the run is over." in capsys.readouterr().out
    assert main(["logs", "first", "--driver", "--worker", "0", "--storage", str(tmp_path)]) == 0
    assert "driver and worker 0 have printed nothing, and the run is over." in capsys.readouterr().out


def test_a_run_that_has_not_ended_may_print_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run_store(str(tmp_path), "first")
    store.put(CONFIG, b"{}")
    write_status(store, RunStatus(status="running", num_workers=2))
    assert main(["logs", "first", "--worker", "0", "--storage", str(tmp_path)]) == 0
    assert "There is nothing yet; --follow waits for it." in capsys.readouterr().out


def test_the_logs_of_a_sweep_are_those_of_its_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run_store(str(tmp_path), "rates")
    store.put(CONFIG, b"{}")
    write_json(store, SWEEP, {"vary": ["seed=0,1"], "points": [{"seed": 0}, {"seed": 1}]})
    write_status(store, RunStatus(status="finished"))
    assert main(["logs", "rates", "--storage", str(tmp_path)]) == 2
    said = "'rates' is a sweep; its trials have the logs, none of which has begun."
    assert said in capsys.readouterr().err
    run_store(str(tmp_path), "rates-01").put(CONFIG, b"{}")
    assert main(["logs", "rates", "--follow", "--storage", str(tmp_path)]) == 2
    again = shell_command("logs", "rates-01", storage=str(tmp_path))
    assert f"such as `{again}`" in capsys.readouterr().err


def test_lines_that_were_followed_end_without_an_empty_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run_store(str(tmp_path), "first")
    store.put(CONFIG, b"{}")
    store.put("logs/" + log_name(worker_log(0), "20261122T120000", "out"), b"step 1\nstep 2\n")
    write_status(store, RunStatus(status="finished", num_workers=1))
    assert main(["logs", "first", "--worker", "0", "--follow", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\nstep 1\nstep 2\n")
