"""A shell, ``uv run`` and ``ray job stop`` each send or forward a signal: two within a second are one stop."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from raytrain.display.console import PlainConsole
from raytrain.monitor import stop_request as stop_signals
from raytrain.monitor.stop_request import StopSignals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the handler sees, as a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(stop_signals, "monotonic", lambda: now[0])
    return now


def test_signals_within_a_second_are_one_stop(clock: list[float]) -> None:
    with StopSignals() as signals:
        for clock[0], number in ((1000.0, signal.SIGINT), (1000.3, signal.SIGTERM), (1000.9, signal.SIGINT)):
            signal.raise_signal(number)
        assert signals.stop_request is not None and signals.stop_request.detail == "SIGINT"


def test_a_signal_a_second_later_aborts(clock: list[float]) -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        clock[0] += 0.9
        signal.raise_signal(signal.SIGINT)
        clock[0] += 0.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_pipe_that_nobody_reads_any_more_is_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    output = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", output)
    with StopSignals() as signals:
        with pytest.raises(BrokenPipeError), signals.outlive_terminal():  # of another pipe
            raise BrokenPipeError
        os.close(read)
        with signals.outlive_terminal():
            PlainConsole(file=output).print("a line that nobody reads")
        assert signals.stop_request is not None and signals.stop_request.detail == "SIGPIPE"
    with suppress(BrokenPipeError):
        output.close()


def test_an_output_without_room_stops_nothing() -> None:
    with StopSignals() as signals, signals.outlive_terminal():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert signals.stop_request is None


def test_a_closed_terminal_is_a_request_to_stop_and_never_aborts(clock: list[float]) -> None:
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals() as signals:
        for clock[0] in (1000.0, 1000.5, 1010.0):
            signal.raise_signal(signal.SIGHUP)
        assert signals.stop_request is not None and signals.stop_request.detail == "SIGHUP"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_closed_terminal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.stop_request is None
    finally:
        signal.signal(signal.SIGHUP, before)


WAITING = """
import threading
from raytrain.monitor.stop_request import StopSignals
from tests.helpers.waiting import wait_for

with StopSignals() as signals:
    print("ready", flush=True)
    wait_for(lambda: signals.stop_request)
    print(signals.stop_request.detail, flush=True)
    try:
        threading.Event().wait(60)
    except KeyboardInterrupt:
        print("aborted", flush=True)
"""


def test_a_process_that_gets_two_signals_at_once_stops_and_only_a_later_one_aborts_it() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # may be merged with the first one
        assert process.stdout.readline() == "SIGTERM\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "aborted\n"
