"""Whether the cluster that this process is connected to is free again."""

from __future__ import annotations

import ray

from tests.helpers.waiting import wait_for


def wait_until_free(timeout_s: float = 60) -> None:
    """Return when nobody holds a CPU any more. The cluster counts with some delay."""
    wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], deadline_s=timeout_s)
