"""Ends a cluster that `ray up` started once it has had no job for half an hour. Runs on the head, which Ray never ends.

    python end_when_idle.py ~/ray_bootstrap_config.yaml

A job is whatever Ray lists: `ray job submit`, and any other program that is connected to the cluster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IDLE_MINUTES = 30
_LOOK_EVERY_S = 60
_DASHBOARD = "http://127.0.0.1:8265"


def wait_until_idle(looks: Iterator[bool], idle_minutes: int = IDLE_MINUTES) -> None:
    """Return after ``idle_minutes`` looks in a row, one a minute, that found no job."""
    idle = 0
    while idle < idle_minutes:
        idle = 0 if next(looks) else idle + 1


def looks() -> Iterator[bool]:
    """Yield, once a minute, whether there is a job; True if the job server does not answer, as it may be starting."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    while True:
        time.sleep(_LOOK_EVERY_S)
        try:
            jobs = JobSubmissionClient(_DASHBOARD).list_jobs()
        except Exception as error:
            print(f"The job server does not answer: {error}", flush=True)
            yield True
        else:
            yield any(job.status in (JobStatus.PENDING, JobStatus.RUNNING) for job in jobs)


def end_cluster(config: dict[str, Any]) -> None:
    """End all machines of the cluster as `ray down` does, this one last, with the rights of the head."""
    from ray.autoscaler._private.providers import _get_node_provider
    from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND

    provider = _get_node_provider(config["provider"], config["cluster_name"])
    for kind in (NODE_KIND_WORKER, NODE_KIND_HEAD):
        if nodes := provider.non_terminated_nodes({TAG_RAY_NODE_KIND: kind}):
            print(f"Ending {len(nodes)} machines ({kind})", flush=True)
            provider.terminate_nodes(nodes)


def end_when_idle(config: dict[str, Any]) -> None:
    """End the cluster once it is idle. If the cloud refuses that, try again a minute later, unless there is a job."""
    idle_minutes = IDLE_MINUTES
    while True:
        wait_until_idle(looks(), idle_minutes)
        try:
            return end_cluster(config)
        except Exception as error:
            print(f"The cluster could not be ended, and is tried again: {error}", flush=True)
            idle_minutes = 1


if __name__ == "__main__":
    import yaml

    end_when_idle(yaml.safe_load(Path(sys.argv[1]).expanduser().read_text()))
