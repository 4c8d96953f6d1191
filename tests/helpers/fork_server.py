"""The process that forks those of a local Ray, and commands, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODULE = "raytrain.launch.ray.fork_server"


@contextmanager
def fork_server(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one that listens at ``path``; it answers once it has imported everything."""
    variables = {**os.environ, "RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
    words = [sys.executable, "-m", MODULE, path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=variables) as running:
        while not os.path.exists(path):
            assert running.poll() is None
        yield running
        running.kill()
