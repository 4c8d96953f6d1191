"""Commands that a forked process carries out: they are what the process of the user would be, and end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.fork_server import MODULE, fork_server

CLIENT = """
import sys
from raytrain.backends.ray import command_client as client
from raytrain.backends.ray.warm_cluster import WarmRay

version, variables, path, name = sys.argv[1:]
kept = WarmRay(
    address="",
    pid=0,
    version=version or client.this_version(),
    gpus=None,
    idle_minutes=1.0,
    variables=variables or client.import_variables(),
    fork_server=path,
)
client.running = lambda: kept
code = client.carry_out(f"commands:{name}", {"word": "hello"})
sys.exit(99 if code is None else code)
"""
COMMANDS = """
import os, signal, sys, time
from pathlib import Path

def tell(word):
    print(word, input(), os.getcwd(), os.environ["OF_THE_CLIENT"], oct(os.umask(0)))
    print("wrong", file=sys.stderr)
    return 3

def wait(word):
    try:
        print("ready", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        return 130

def wait_for_end(word):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path("ended").touch()))
    wait(word)

def die(word):
    os.kill(os.getpid(), signal.SIGKILL)
"""
NOTHING_DONE = 99
_WITHIN_S = 250.0  # the first command waits for all imports


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("fork") / "socket")
    with fork_server(path):
        yield path


class Client:
    """Starts the process of a user in ``folder``."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder
        self._path = path
        self._started: list[subprocess.Popen[str]] = []
        (folder / "commands.py").write_text(COMMANDS)

    def start(
        self,
        name: str,
        version: str = "",
        variables: str = "",
        path: str = "",
        ignored: signal.Signals | None = None,
    ) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", CLIENT, version, variables, path or self._path, name]
        process = subprocess.Popen(
            ["env", f"--ignore-signal={ignored.name}", *words] if ignored else words,
            cwd=self.folder,
            env={**os.environ, "OF_THE_CLIENT": "seen", "PYTHONPATH": os.getcwd()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            umask=0o027,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def client(socket_path: str, tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path, socket_path)
    yield made
    made.close()


def test_a_command_has_the_folder_variables_and_streams_of_its_client(client: Client) -> None:
    process = client.start("tell")
    out, errors = process.communicate("typed\n", timeout=_WITHIN_S)
    assert (process.returncode, errors) == (3, "wrong\n")
    assert out == f"hello typed {client.folder} seen 0o27\n"


def test_somebody_who_says_nothing_holds_up_nobody(client: Client, socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(socket_path)
        process = client.start("tell")
        process.communicate("typed\n", timeout=_WITHIN_S)
    assert process.returncode == 3


def test_ctrl_c_reaches_the_command(client: Client) -> None:
    process = client.start("wait")
    read_line(process, "ready")
    process.send_signal(signal.SIGINT)
    assert process.wait(_WITHIN_S) == 130


def test_ctrl_z_stops_the_command_until_the_client_goes_on(client: Client) -> None:
    process = client.start("wait")
    read_line(process, "ready")
    process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    (command,) = forked()
    while command.status() != psutil.STATUS_STOPPED:
        assert command.is_running()
    process.send_signal(signal.SIGCONT)
    while command.status() == psutil.STATUS_STOPPED:
        assert command.is_running()
    process.send_signal(signal.SIGINT)
    assert process.wait(_WITHIN_S) == 130


def test_a_command_under_nohup_outlives_its_terminal(client: Client) -> None:
    process = client.start("wait", ignored=signal.SIGHUP)
    read_line(process, "ready")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(_WITHIN_S) == 130, "it was still there"


def test_the_command_ends_with_its_client(client: Client) -> None:
    process = client.start("wait_for_end")
    read_line(process, "ready")
    (command,) = forked()
    process.kill()
    command.wait(_WITHIN_S)
    assert (client.folder / "ended").exists()


def test_a_command_that_is_killed_is_told(client: Client) -> None:
    process = client.start("die")
    _, errors = process.communicate(timeout=_WITHIN_S)
    assert (process.returncode, errors) == (137, "raytrain: the command was ended by SIGKILL.\n")


@pytest.mark.parametrize("differs", [{"version": "0"}, {"variables": "0"}, {"path": "gone"}])
def test_nothing_is_done_if_the_kept_process_does_not_fit(client: Client, differs: dict[str, Any]) -> None:
    process = client.start("tell", **differs)
    out, errors = process.communicate("typed\n", timeout=_WITHIN_S)
    assert (process.returncode, out, errors) == (NOTHING_DONE, "", "")


def test_variables_that_torch_reads_decide_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from raytrain.backends.ray.warm_cluster import import_variables

    before = import_variables()
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert import_variables() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert import_variables() != before


def read_line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == expected


def forked() -> list[psutil.Process]:
    """The processes of commands: below the server, and below the process that watches over the command."""
    (server,) = (child for child in psutil.Process().children() if MODULE in child.cmdline())
    return [command for watcher in server.children() for command in watcher.children()]
