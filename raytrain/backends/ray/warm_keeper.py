"""The process that ``raytrain up`` leaves behind: it holds a Ray cluster, and keeps processes in it that wait for work.

A run uses up the processes that it takes. When it is over, others are started. If nobody uses the cluster for a while,
or at a SIGTERM, the cluster ends, and this process with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from raytrain.backends.machine import available_bytes, cores, machine_hardware
from raytrain.backends.ray.lean_imports import lean_imports
from raytrain.backends.ray.local_cluster import LocalCluster
from raytrain.backends.ray.private_api import start_processes
from raytrain.backends.ray.warm_cluster import (
    JOB_VARIABLES,
    READY_FOLDER,
    WarmRay,
    forget,
    locked,
    remember,
    this_version,
    visible_gpus,
)
from raytrain.errors import UsageError

_LOOK_EVERY_S = 1.0
_LOOK_AT_START_EVERY_S = 0.1
_READY_WITHIN_S = 180.0
_BESIDE_WORKERS = 3  # the coordinator, and two processes of Ray Train
_READERS_PER_CORE, _MOST_READERS = 2, 4  # some read the start of a stream while others start with its rest
_MOST_PROCESSES = 16
_PROCESS_BYTES = 540 * 1024**2  # with its share of what all have in common
_SETTINGS = {
    "RAY_preload_python_modules": "raytrain.backends.ray.warm_process",
    "RAY_prestart_worker_first_driver": "0",  # processes that fit no run here would take the cores as one starts
}
_WAITS = "ray::IDLE"  # the name that Ray gives to a process without work


class Pool:
    """The processes that wait for work. Each notes its number in ``folder`` when it is ready."""

    def __init__(self, address: str, size: int, folder: Path) -> None:
        self.size = size
        self._address = address
        self._folder = folder
        self._ready: set[str] = set()
        self._expected, self._asked_at = 0, 0.0

    def fill(self) -> bool:
        """Ask for processes that are missing; returns whether none is. Raises UsageError if none comes."""
        self._ready.update(os.listdir(self._folder))
        if len(self._ready) < self._expected:
            self._check_they_come()
            return False
        missing = self.size - sum(map(_waits, self._ready))
        if missing > 0:
            number = min(missing, cores())  # Ray starts no more at a time, and forgets the others
            start_processes(self._address, number, JOB_VARIABLES)
            self._expected, self._asked_at = len(self._ready) + number, time.monotonic()
        return missing <= 0

    def _check_they_come(self) -> None:
        if time.monotonic() - self._asked_at > _READY_WITHIN_S:
            raise UsageError(
                f"Ray's processes were not ready after {_READY_WITHIN_S:.0f} seconds; `raytrain doctor` may say why."
            )


def _waits(process: str) -> bool:
    with suppress(psutil.Error, IndexError):
        return psutil.Process(int(process)).cmdline()[0].startswith(_WAITS)
    return False


def pool_size() -> int:
    """As many processes as a run on this machine uses, if they take at most half of the memory that is free."""
    found = machine_hardware()
    wanted = _BESIDE_WORKERS + int(found.gpus or found.cpus) + min(_READERS_PER_CORE * int(found.cpus), _MOST_READERS)
    return max(1, min(wanted, _MOST_PROCESSES, available_bytes() // 2 // _PROCESS_BYTES))


def keep(idle_minutes: float) -> None:
    """Hold the cluster until it has been idle for that long; print its address as soon as all processes are ready."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    for of_terminal in (signal.SIGINT, signal.SIGHUP):
        signal.signal(of_terminal, signal.SIG_IGN)
    with TemporaryDirectory(prefix="raytrain-warm-") as folder, lean_imports():
        cluster = LocalCluster({**_SETTINGS, READY_FOLDER: folder})
        try:
            address = cluster.address()
            pool = Pool(address, pool_size(), Path(folder))
            while not pool.fill():
                if ended.wait(_LOOK_AT_START_EVERY_S):
                    return
            remember(WarmRay(address, os.getpid(), this_version(), visible_gpus(), idle_minutes, pool.size))
            print(address, flush=True)
            _wait_until_idle(cluster, pool, 60 * idle_minutes, ended)
        finally:
            forget()
            cluster.close()


def _wait_until_idle(cluster: LocalCluster, pool: Pool, idle_s: float, ended: threading.Event) -> None:
    used_at = time.monotonic()
    while cluster.runs and not ended.wait(_LOOK_EVERY_S):
        with locked() as free:
            if not free:
                used_at = time.monotonic()
            elif time.monotonic() - used_at < idle_s:
                pool.fill()
            else:
                forget()  # before a command can lock it
                return


if __name__ == "__main__":
    keep(float(sys.argv[1]))
