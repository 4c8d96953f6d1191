"""A cluster of one's own ends with the connection, and nothing starts another behind its back."""

from __future__ import annotations

import os
import subprocess
import sys

LATE = """
from raytrain.cluster import connection

with connection("local") as cluster:
    cluster.connect()
    import ray

    assert ray.is_initialized()
try:
    ray.put("from a thread that still reads")
except ray.exceptions.RaySystemError:
    print("another Ray" if ray.is_initialized() else "nothing")
"""


def test_who_comes_too_late_starts_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing"), done.stderr
