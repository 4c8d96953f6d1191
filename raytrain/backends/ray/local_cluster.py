"""Holds a Ray cluster on this machine, in a process beside the driver, for as long as its standard input is open.

So the cluster starts while the driver still imports, a Ctrl-C in the terminal does not reach it, and it ends with the
driver, however the driver ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Parts that Ray starts by default and that a one-machine cluster without a dashboard does not use: seconds of start-up.
_WITHOUT_EXTRAS = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# A process that reads data takes seconds to start. By default Ray ends it after one idle second if actors use all CPUs.
_KEEP_IDLE_WORKERS = {"RAY_idle_worker_killing_time_threshold_ms": "60000"}


class LocalCluster:
    """A local cluster that is starting. Its processes see ``environment`` besides this process's variables."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        _agree_on_token()
        os.environ.update(_WITHOUT_EXTRAS | _KEEP_IDLE_WORKERS)
        # A session of its own: a Ctrl-C in the terminal is for the driver alone.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raytrain.backends.ray.local_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def address(self) -> str:
        """The cluster's address, once it is up; raises RuntimeError if it could not start."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("Ray could not start a cluster on this machine; `ray start --head` says why.")
        return line

    def close(self) -> None:
        """End the cluster, and wait until its processes are gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def _agree_on_token() -> None:
    """Create the token that new clusters ask for before either process loads Ray, which looks for it only once."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] != "token" or "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path = Path.home() / ".ray" / "auth_token"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
        ):
            file.write(secrets.token_hex(32))


def hold() -> None:
    """Start the cluster, print its address, and keep it until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import ray

    context: Any = ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    hold()
