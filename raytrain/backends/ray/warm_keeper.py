"""The process that ``raytrain up`` leaves behind: it holds a Ray cluster, and the fork server of its processes.

If nobody uses the cluster for a while, or at a SIGTERM, the cluster ends, and this process with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from raytrain.backends.ray.command_client import is_ready
from raytrain.backends.ray.lean_imports import lean_imports
from raytrain.backends.ray.local_cluster import LocalCluster
from raytrain.backends.ray.warm_cluster import (
    WarmRay,
    forget,
    import_variables,
    locked,
    remember,
    this_version,
    visible_gpus,
)

_LOOK_EVERY_S = 1.0


def keep(idle_minutes: float) -> None:
    """Hold the cluster until it has been idle for that long; print its address as soon as it is there."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    for of_terminal in (signal.SIGINT, signal.SIGHUP):
        signal.signal(of_terminal, signal.SIG_IGN)
    variables = import_variables()
    with lean_imports():
        cluster = LocalCluster({})
        try:
            address = cluster.address()
            remember(
                WarmRay(
                    address=address,
                    pid=os.getpid(),
                    version=this_version(),
                    gpus=visible_gpus(),
                    idle_minutes=idle_minutes,
                    variables=variables,
                    fork_server=cluster.fork_server if is_ready(cluster.fork_server) else "",
                )
            )
            print(address, flush=True)
            _wait_until_idle(cluster, 60 * idle_minutes, ended)
        finally:
            forget()
            cluster.close()


def _wait_until_idle(cluster: LocalCluster, idle_s: float, ended: threading.Event) -> None:
    used_at = time.monotonic()
    while cluster.runs and not ended.wait(_LOOK_EVERY_S):
        with locked() as free:
            if not free:
                used_at = time.monotonic()
            elif time.monotonic() - used_at >= idle_s:
                forget()  # before a command can lock it
                return


if __name__ == "__main__":
    keep(float(sys.argv[1]))
