"""Machines that come when a run asks for them, and go when they are idle: with Ray's fake provider of nodes."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import raytrain
from raytrain.monitor.run_reader import RunReader
from raytrain.runs.documents import run_store
from raytrain.runs.records import read_run
from tests.helpers.hosts import Host, hosts, missing_programs
from tests.helpers.ray_head import RAY
from tests.helpers.waiting import DEADLINE_S, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to make namespaces"),
    pytest.mark.skipif(bool(missing_programs()), reason=f"needs {', '.join(missing_programs())}"),
]

FAKE_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_ID = "f" * 51 + "00000"
FOUR_CPUS_IN_TWO_NODES = {
    "cluster_name": "fake",
    "max_workers": 2,
    "idle_timeout_minutes": 0.2,
    "upscaling_speed": 1.0,
    "provider": {
        "type": "external",
        "module": FAKE_PROVIDER,
        "launch_multiple": True,
        "head_node_id": HEAD_ID,
        "disable_node_updaters": True,
    },
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    },
    **{key: {} for key in ["auth", "docker", "head_node", "worker_nodes", "file_mounts"]},
    **{
        key: [] for key in ["initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"]
    },
    **{key: [] for key in ["head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"]},
    "file_mounts_sync_continuously": False,
}
AUTOSCALER = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_enable_autoscaler_v2": "1",  # which clouds use
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
}
COUNT = "import ray; ray.init('auto', log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Host]:
    """A host with the head of a cluster, which has no CPUs itself."""
    (tmp_path / "autoscaling.yaml").write_text(yaml.safe_dump(FOUR_CPUS_IN_TWO_NODES))
    with hosts(tmp_path, ["cloud"]) as started:
        host = started["cloud"]
        (host.home / ".ray").mkdir()
        (host.home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
        head = ["start", "--head", "--num-cpus=0", f"--autoscaling-config={tmp_path / 'autoscaling.yaml'}"]
        host.output([*RAY, *head, "--include-dashboard=false", "--disable-usage-stats"], environment(host) | AUTOSCALER)
        yield host


def environment(host: Host) -> dict[str, str]:
    return {
        "HOME": str(host.home),
        "PYTHONPATH": os.getcwd(),
        "RAY_AUTH_MODE": "token",
    }


def num_nodes(host: Host) -> int:
    """Nodes that are alive, with the head."""
    return int(host.output([sys.executable, "-c", COUNT], environment(host)).splitlines()[-1])


def test_nodes_come_for_a_run_and_go_after_it(cloud: Host, images: Path, tmp_path: Path) -> None:
    train = ["custom", "--name", "run", "--data", str(images), "--storage", str(tmp_path / "runs"), "--trace"]
    train += ["--model", "tests.helpers.memory_runs:network", "--image-size", "12", "12", "--batch-size", "20"]
    train += ["--workers", "2..4", "--wait-for-machines-s", str(DEADLINE_S), "--epochs", "100000", "--json"]
    train += ["--evaluate-every", "0", "--checkpoint-every", "100ep"]
    driver = cloud.run([sys.executable, "-m", "raytrain", "train", *train], environment(cloud))
    run = RunReader(run_store(str(tmp_path / "runs"), "run"), "run")
    wait_for(lambda: run.exists() and run.snapshot().num_workers == 4, "the run did not get four workers")
    wait_for(lambda: run.snapshot().step > 0, "the run did not start")
    raytrain.stop("run", storage=str(tmp_path / "runs"))
    output, errors = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 0, errors
    assert json.loads(output.splitlines()[-1])["status"] == "stopped"
    assert "Waiting for machines: there is room for 0 of 2 workers" in errors
    assert read_run(str(tmp_path / "runs"), "run").summary["checkpoint"]
    assert raytrain.audit("run", storage=str(tmp_path / "runs")).clean
    wait_for(lambda: num_nodes(cloud) == 1, "idle nodes did not go")
