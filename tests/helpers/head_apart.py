"""A Ray cluster of two machines, as far as Ray can see: a head without CPUs, and a node for driver and workers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from raytrain.launch.ray.own_cluster import TOO_SLOW
from tests.helpers.ray_head import RAY, free_port
from tests.helpers.waiting import wait_for

_HEAD_IP, _NODE_IP = "127.0.0.2", "127.0.0.1"
_NUM_TRIES = 5  # Ray gives a node 30 s to start, which is little on a busy machine
_MACHINE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Ray looks for a head among all processes that it sees; a machine's processes see no others, and end together."""


class ClusterWithHeadApart:
    """A head, which can be frozen, or killed and begun again if ``of_nodes`` has the address of a Redis server."""

    def __init__(self, folder: Path, of_nodes: Mapping[str, str]) -> None:
        self.address = f"{_HEAD_IP}:{free_port()}"
        self._environment = {**os.environ, "RAY_AUTH_MODE": "token", "PYTHONPATH": os.getcwd()}
        self._of_nodes = {**self._environment, **of_nodes}
        self._logs = folder
        self._head = self._start_head("head.log")
        address = [f"--address={self.address}", f"--node-ip-address={_NODE_IP}"]
        self._node = self._start("node.log", *address, "--num-cpus=2")

    def run_on_node(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on the machine that is not the head."""
        there = ["nsenter", f"--target={_first_process(self._node).pid}", "--pid", "--mount", f"--wd={os.getcwd()}"]
        pipe = subprocess.PIPE
        return subprocess.Popen([*there, *words], env=self._environment, stdout=pipe, stderr=pipe, text=True)

    def freeze(self) -> None:
        """Stop the GCS, so that nobody reaches it; connections to it stay."""
        self._gcs().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._gcs().send_signal(signal.SIGCONT)

    def kill_head(self) -> None:
        _kill(self._head)

    def restart_head(self) -> None:
        """Start a head at the same address."""
        self._head = self._start_head("second-head.log")

    def close(self) -> None:
        for machine in (self._node, self._head):
            _kill(machine)

    def _gcs(self) -> psutil.Process:
        (gcs,) = (each for each in _first_process(self._head).children() if each.name() == "gcs_server")
        return gcs

    def _start_head(self, log: str) -> subprocess.Popen[bytes]:
        ip, _, port = self.address.partition(":")
        address = [f"--node-ip-address={ip}", f"--port={port}"]
        return self._start(log, "--head", *address, "--num-cpus=0", "--include-dashboard=false")

    def _start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        for _ in range(_NUM_TRIES):
            machine = self._try_to_start(log, *words)
            if TOO_SLOW not in (self._logs / log).read_text():
                break
        assert _started(self._logs / log), (self._logs / log).read_text()
        return machine

    def _try_to_start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        command = [*_MACHINE, *RAY, "start", *words, "--block", "--disable-usage-stats"]
        with (self._logs / log).open("w") as file:
            machine = subprocess.Popen(command, env=self._of_nodes, stdout=file, stderr=file)
        wait_for(lambda: _started(self._logs / log) or machine.poll() is not None, f"no node has started, see {log}")
        return machine


@contextmanager
def cluster_with_head_apart(folder: Path, of_nodes: Mapping[str, str]) -> Iterator[ClusterWithHeadApart]:
    """Start the cluster; its nodes, not commands, have the variables ``of_nodes``, and log to ``folder``."""
    if os.geteuid() != 0:
        pytest.skip("only root may make processes that see no others")
    cluster = ClusterWithHeadApart(folder, of_nodes)
    try:
        yield cluster
    finally:
        cluster.close()


def _started(log: Path) -> bool:
    return "Ray runtime started" in log.read_text()


def _first_process(machine: subprocess.Popen[bytes]) -> psutil.Process:
    (first,) = psutil.Process(machine.pid).children()
    return first


def _kill(machine: subprocess.Popen[bytes]) -> None:
    """End all processes of a machine at once."""
    if machine.poll() is None:
        _first_process(machine).kill()
        machine.wait()
