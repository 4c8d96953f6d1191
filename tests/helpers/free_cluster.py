"""Whether the cluster that this process is connected to is free again."""

from __future__ import annotations

import time

import ray


def wait_until_free(timeout_s: float = 60) -> None:
    """Return when nobody holds a CPU any more. The cluster counts with some delay."""
    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)
