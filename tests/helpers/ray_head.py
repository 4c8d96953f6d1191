"""A Ray cluster started with ``ray start --head`` on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raytrain.launch.ray.own_cluster import TOO_SLOW
from tests.helpers.waiting import wait_for

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(frozen=True)
class Head:
    """A running cluster: its address, its dashboard's URL, and the environment in which commands find it."""

    process: subprocess.Popen[bytes]
    address: str
    dashboard: str
    environment: Mapping[str, str]


@contextmanager
def started_head(folder: Path, *options: str) -> Iterator[Head]:
    """Start a head with 2 CPUs and these ``options`` of `ray start`; its output goes to a file in ``folder``."""
    log = folder / "head.log"
    with ExitStack() as ended:
        for _ in range(3):  # Ray gives it 30 s to start, which is little on a busy machine
            head = _start(log, options)
            ended.callback(_end, head.process)
            if _comes_up(head.process, log) or TOO_SLOW not in log.read_text():
                break
        assert head.process.poll() is None, log.read_text()
        yield head


def _start(log: Path, options: tuple[str, ...]) -> Head:
    # The default ports may be taken by another cluster on this machine.
    dashboard, gcs, agent = free_port(), free_port(), free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "PYTHONPATH": os.getcwd()}
    ports = [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command = [*RAY, "start", "--head", "--num-cpus=2", "--block", "--disable-usage-stats", *ports, *options]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    return Head(process, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", environment)


def _comes_up(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether the head is whole in the end; its ports answer before."""
    wait_for(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, "the head does not start")
    return process.poll() is None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for_port(port: int, host: str = "127.0.0.1") -> None:
    def answers() -> bool:
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            return True
        return False

    wait_for(answers, f"nothing listens on port {port}")
