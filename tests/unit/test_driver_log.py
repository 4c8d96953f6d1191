"""What the driver of a run prints and logs is kept in the run's storage, without secrets, while it runs."""

from __future__ import annotations

import io
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
from rich.live import Live

from raytrain.cli.main import main
from raytrain.display.console import PlainConsole
from raytrain.runs import logs
from raytrain.runs.documents import CONFIG, LOGS, run_store
from raytrain.runs.logs import DRIVER, DriverLog, LogReader
from raytrain.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = run_store(str(tmp_path), "first")
    store.put(CONFIG, b"{}")
    return store


def kept(store: Store) -> str:
    return "".join(log.text for log in LogReader(store, DRIVER).read())


def test_what_it_prints_and_logs_and_why_it_failed_is_kept_without_secrets(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-1")
    before, events = (sys.stdout, sys.stderr), logging.getLogger("raytrain.monitor.document_writer")

    def drive() -> None:
        with DriverLog(store):
            print("printed secret-1")
            sys.stdout.writelines(["two ", "pieces\n"])
            print("a warning", file=sys.stderr)
            events.info("first: an event")
            raise ValueError("no such class")

    with pytest.raises(ValueError, match="no such class"):
        drive()
    events.info("over")
    assert (sys.stdout, sys.stderr) == before
    printed, text = capsys.readouterr(), kept(store)
    assert printed.out == "printed secret-1\ntwo pieces\n" and "Traceback" not in printed.err
    assert text.startswith("printed …\ntwo pieces\n") and text.endswith("ValueError: no such class\n")
    assert "a warning" in text and " first: an event\n" in text and "over" not in text


def test_what_handlers_of_loggers_print_is_kept_once(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    handler, logger = logging.StreamHandler(), logging.getLogger("raytrain")
    logger.addHandler(handler)
    try:
        with DriverLog(store):
            logger.warning("there is no GPU")
        logger.warning("over")
    finally:
        logger.removeHandler(handler)
    assert kept(store) == "there is no GPU\n"
    assert capsys.readouterr().err == "there is no GPU\nover\n"


def test_a_stream_that_a_library_has_kept_prints_after_the_log_has_ended(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with DriverLog(store):
        kept_by_colorama = sys.stdout
    print("reset", file=kept_by_colorama)
    assert capsys.readouterr().out == "reset\n" and kept(store) == ""


@pytest.mark.not_quick
@pytest.mark.timeout(30)
def test_a_signal_handler_may_print_while_something_is_printed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    before = signal.signal(signal.SIGUSR1, lambda *signalled: print("signalled"))
    try:
        with DriverLog(store):
            # Writing the line takes tens of milliseconds, in the middle of which the signal arrives.
            for _ in range(3):
                line = "…" * 10_000_000
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                print(line)
            print("over")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert printed.getvalue().count("signalled") == 3
    assert kept(store).endswith("over\n")


def test_a_run_goes_on_if_the_disk_of_the_temporary_folder_is_full(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # stands for the disk; Python ignores the signal of it
    try:
        with DriverLog(store):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            for step in range(100):
                print("step", step)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            print("over")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.count("step") == 100
    assert kept(store).startswith("step 0\nstep 1\n") and kept(store).endswith("over\n")


def test_it_is_there_while_the_driver_runs_and_only_its_end_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 8)  # the real limit, 8 MiB, would hide which bytes are kept
    with DriverLog(store) as log:
        for number in range(100):
            print(number)
        log.copy()
        assert kept(store) == "\n98\n99\n"[-8:].rjust(8, "7")


def test_a_picture_that_is_redrawn_is_not_kept_but_what_is_printed_above_it_is(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with Live("a picture", console=PlainConsole(force_terminal=True)) as live, DriverLog(store):
        live.update("another picture", refresh=True)
        print("printed")
        live.refresh()
    assert kept(store) == "printed\n"
    assert "another picture" in capsys.readouterr().out


def test_a_run_that_never_began_has_no_log(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "first")
    with DriverLog(store):
        print("refused")
    assert list(store.list(LOGS)) == []


def test_the_command_shows_it(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DriverLog(store):
        print("\x1b[2Jhello")
    capsys.readouterr()
    assert main(["logs", "first", "--driver", "--storage", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "== driver, started " in shown and "␛[2Jhello" in shown
