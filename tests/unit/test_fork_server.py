"""The process that forks those of a local Ray: what its client is given, with the server and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain.launch.ray import fork_client
from tests.helpers.fork_server import fork_server

pytestmark = pytest.mark.not_quick

FORK_TWO = """
import os
from threading import Thread
from raytrain.launch.ray.fork_server import import_all

import_all()
for _ in range(2):
    if not os.fork():
        import ray
        drawn = [ray.ObjectRef.from_random().hex()]
        thread = Thread(target=lambda: drawn.append(ray.ObjectRef.from_random().hex()))
        thread.start()
        thread.join()
        print(*drawn, flush=True)
        os._exit(0)
    os.wait()
"""
USAGE = "usage: default_worker.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with fork_server(str(tmp_path / "socket")) as running:
        yield running


def ask_for_help(folder: Path, *more: str) -> str:
    """What Ray's program prints if the client is asked for it as Ray asks: with two programs, of which one sets up."""
    program = fork_client.__file__
    return subprocess.run(
        [sys.executable, program, program, "--help", *more],
        env={**os.environ, fork_client.FORK_SERVER: str(folder / "socket")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_it_runs_rays_program_with_the_output_of_the_client(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert server.pid
    assert ask_for_help(tmp_path, "--language=PYTHON", '--serialized-runtime-env-context={"env_vars": {"A": "b"}}')


def test_it_ends_with_its_standard_input(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(120) == 0


def test_without_it_rays_own_program_runs(tmp_path: Path) -> None:
    assert USAGE in ask_for_help(tmp_path)


def test_if_it_dies_rays_own_program_runs(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    server.kill()
    server.wait()
    assert USAGE in ask_for_help(tmp_path)


def test_no_two_forked_processes_draw_the_same_ids_of_tasks_and_objects() -> None:
    drawn = subprocess.run([sys.executable, "-c", FORK_TWO], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert len(set(drawn.split())) == 4
