"""A Ray cluster started with ``ray start --head`` on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 400.0
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(frozen=True)
class Head:
    """A running cluster: its address, its dashboard's URL, and the environment in which commands find it."""

    process: subprocess.Popen[bytes]
    address: str
    dashboard: str
    environment: Mapping[str, str]


@contextmanager
def started_head(folder: Path, node_types: Mapping[str, Any] | None = None) -> Iterator[Head]:
    """Start a head with 2 CPUs; its output goes to a file in ``folder``.

    With ``node_types``, its autoscaler starts nodes of these types, as processes of this machine.
    """
    # The default ports may be taken by another cluster on this machine.
    dashboard, gcs, agent = free_port(), free_port(), free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "PYTHONPATH": os.getcwd()}
    options = [] if node_types is None else autoscaling(folder, node_types, gcs, environment)
    ports = [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            [*RAY, "start", "--head", "--num-cpus=2", "--block", "--disable-usage-stats", *ports, *options],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for_port(dashboard)
        yield Head(process, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", environment)
    finally:
        process.terminate()
        process.wait(60)


def autoscaling(folder: Path, node_types: Mapping[str, Any], gcs: int, environment: dict[str, str]) -> list[str]:
    """The options, and in ``environment`` the variables, with which Ray's fake provider starts nodes.

    ``ray.cluster_utils.AutoscalingCluster`` would first end all of this machine's clusters.
    """
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
    from ray.util import get_node_ip_address

    head = {"ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0}}
    provider = {"type": "fake_multinode", "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID}
    config = {
        "cluster_name": "fake",
        "max_workers": 4,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "head_node_type": "ray.head.default",
        "available_node_types": {**head, **node_types},
        "provider": {**provider, "gcs_address": f"{get_node_ip_address()}:{gcs}"},
        "auth": {},
        "docker": {},
        **{f"{kind}_commands": [] for kind in ("initialization", "setup", "head_setup", "worker_setup")},
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
    }
    (folder / "autoscaling.yaml").write_text(json.dumps(config))
    environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1"}
    environment |= {"RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
    return [f"--autoscaling-config={folder / 'autoscaling.yaml'}"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.2)
