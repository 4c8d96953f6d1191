"""The Ray that raytrain starts on this machine runs only the processes that it needs, and leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from raytrain.launch.ray.own_cluster import LocalCluster
from raytrain.launch.ray.private_api import NO_AGENT, loopback_environment
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.not_quick
DRIVER = """
import os, sys
import ray

ray.init(sys.argv[1], log_to_driver=False)
task = ray.remote(lambda: os.environ["OF_A_TASK"]).options(runtime_env={"env_vars": {"OF_A_TASK": "yes"}})
print(ray.get(task.remote()))
"""


@pytest.mark.skipif(sys.platform != "linux" or NO_AGENT.find() is None, reason="Ray starts the agent here")
def test_it_has_no_agent_of_a_dashboard_runs_tasks_with_an_environment_and_ends_with_its_raylet() -> None:
    cluster = LocalCluster({})
    with closing(cluster):
        address = cluster.address()
        (raylet,) = (each for each in psutil.Process().children(recursive=True) if each.name() == "raylet")
        others = raylet.children()
        commands = [" ".join(each.cmdline()) for each in others]
        # The agent renames itself as soon as it has imported its modules.
        assert not [each for each in commands if "dashboard/agent.py" in each or "DashboardAgent" in each]

        driver, variables = [sys.executable, "-c", DRIVER, address], os.environ | loopback_environment()
        printed = subprocess.run(driver, env=variables, capture_output=True, text=True, check=True, timeout=120).stdout
        assert printed.split() == ["yes"]

        raylet.kill()
        wait_for(lambda: not any(each.is_running() for each in others), "processes outlive their raylet")
