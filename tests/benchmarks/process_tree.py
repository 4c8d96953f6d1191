"""End a process and all of its descendants, in any session: a Ray cluster outlives its driver for a while."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from typing import Any

import psutil

_GONE_WITHIN_S = 30.0


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


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
