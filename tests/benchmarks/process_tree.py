"""A process and all of its descendants, in any session: to end them, for a Ray cluster outlives its driver for a while,
and to measure their CPU time."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

import psutil

_GONE_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.1


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Terminate ``process``, kill the remaining descendants after 30 s, and wait until all have ended."""
    tree = _descendants(process.pid)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GONE_WITHIN_S)
    tree |= _descendants(process.pid)
    _, alive = psutil.wait_procs(tree, timeout=_GONE_WITHIN_S)
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, timeout=_GONE_WITHIN_S)
    process.wait()


def cpu_until_end(process: subprocess.Popen[Any]) -> list[tuple[float, float]]:
    """Wait for the end of a process. Returns the times of all looks, and the seconds of a core that the tree had used.

    Raises RuntimeError if it fails.
    """
    looks, tree = [(time.time(), 0.0)], CpuOfTree(process.pid)
    while process.poll() is None:
        looks.append((time.time(), tree.look()))
        time.sleep(_LOOK_EVERY_S)  # until the next sample of the use
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with {process.returncode}")
    return looks


class CpuOfTree:
    """The CPU time of a process and its descendants, also of those that have ended, as of the last look."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds: dict[int, float] = {}

    def look(self) -> float:
        """Read the times of all processes that there are; returns the seconds of a core."""
        for process in _descendants(self._pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._seconds[process.pid] = times.user + times.system
        return sum(self._seconds.values())


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
