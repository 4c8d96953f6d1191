"""Calls from the workers of a run to the process that started it."""

from __future__ import annotations

import dataclasses
import threading
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from raytrain.errors import UsageError
from raytrain.launch.local.coordinator_socket import Caller, CallServer


class Target:
    """What is called."""

    def add(self, a: int, b: int) -> int:
        return a + b

    def refuse(self) -> None:
        raise UsageError("--model is wrong")


def test_a_call_returns_what_the_function_returns_or_raises_what_it_raises(tmp_path: Path) -> None:
    server = CallServer(tmp_path, Target())
    call = Caller(server.address)
    assert call(Target.add, 2, 3) == 5
    with pytest.raises(UsageError, match="--model is wrong"):
        call(Target.refuse)
    server.close()


def test_a_stranger_is_turned_away_and_hurts_nobody(tmp_path: Path) -> None:
    server = CallServer(tmp_path, Target())
    with pytest.raises(AuthenticationError):
        Caller(dataclasses.replace(server.address, key=b"guessed"))
    assert Caller(server.address)(Target.add, 1, 1) == 2
    server.close()


def test_a_server_that_just_stopped_accepting_closes(tmp_path: Path) -> None:
    server = CallServer(tmp_path, Target())
    server._closed = True  # pyright: ignore[reportPrivateUsage] ; as close() does, when a connection was just accepted
    Caller(server.address)
    server._thread.join()  # pyright: ignore[reportPrivateUsage]
    server.close()


def test_the_key_is_not_shown(tmp_path: Path) -> None:
    server = CallServer(tmp_path, Target())
    assert str(server.address.key) not in repr(server.address)
    server.close()


def test_a_worker_whose_driver_was_killed_says_nothing_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.launch.local.agent import SocketReporter  # imports torch

    class Killed:
        """A driver whose connections close in the middle of a call."""

        def wait_for_stop_request(self, _: float) -> None:
            raise SystemExit

    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    server = CallServer(tmp_path, Killed())
    reporter = SocketReporter(server.address)
    reporter.watch_for_stop()
    for thread in threading.enumerate():
        if thread.name == "stop-watch":
            thread.join()
    server.close()
    assert [args.exc_type for args in raised if args.exc_type is not SystemExit] == []
