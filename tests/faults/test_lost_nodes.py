"""A run whose cluster loses its head, or the node of its workers in mid-checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.demo.s3_server import S3Server
from raytrain.launch.ray.connection import HEAD_AWAY_S
from tests.helpers.faulty_runs import command, read_steps, summary_of, whole_steps
from tests.helpers.head_apart import ClusterWithHeadApart, cluster_with_head_apart
from tests.helpers.ray_head import free_port, wait_for_port
from tests.helpers.waiting import DEADLINE_S, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": HEAD_AWAY_S}
"""As in ``cluster/``: by default, Ray ends each process that has not reached the head for a minute."""
AWAY_S = 80.0  # longer than Ray waits by default
LOOP = """
from pathlib import Path

from tests.helpers.small_runs import loop_with
from tests.helpers.waiting import wait_for


def tell_and_wait(run, batch):
    storage = Path(run.config.storage)
    if batch.step == 6:
        (storage / "away").touch()
    if batch.step == 13:
        (storage / "trained on").touch()
        wait_for((storage / "back").exists, deadline_s=1200)


def loop(run):
    loop_with(run, tell_and_wait)
"""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis server, which keeps what a head knows."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed (`apt-get install redis-server`)")
    port = free_port()
    words = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def start_run(cluster: ClusterWithHeadApart, images: Path, storage: Path) -> subprocess.Popen[str]:
    """Start a run; returns it when it is in step 7, and waits for a file ``back`` before step 14."""
    storage.mkdir()
    (storage / "loop.py").write_text(LOOP)
    options = ["--epochs", "4", "--trace", "--loop", f"{storage}/loop.py:loop", "--address", cluster.address, "--json"]
    run = cluster.run_on_node(command(images, storage, *options))
    wait_for(lambda: (storage / "away").exists() or run.poll() is not None, "the run does not train")
    return run


def events(storage: Path) -> str:
    return (storage / "run" / "events.jsonl").read_text()


def assert_finished(run: subprocess.Popen[str], storage: Path) -> None:
    """Check that the run ends as if nothing had happened: each sample was used once in each epoch."""
    out, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, err
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert (summary["status"], summary["samples_seen"]) == ("finished", 324)
    assert raytrain.audit("run", storage=str(storage)).clean
    assert read_steps(storage) == list(range(1, 21))


@pytest.mark.parametrize(("minutes", "of_nodes"), [(1, {}), (10, PATIENT)], ids=["1", "10"])
def test_a_run_trains_on_while_nobody_reaches_the_head(
    minutes: int, of_nodes: Mapping[str, str], images: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "runs"
    with cluster_with_head_apart(tmp_path, of_nodes) as cluster:
        run = start_run(cluster, images, storage)
        cluster.freeze()
        wait_for((storage / "trained on").exists, "the run does not train on")
        time.sleep(60 * minutes)  # for so long a run does without the head
        cluster.thaw()
        wait_for(lambda: "head_back" in events(storage), "the run does not notice that the head is back")
        (storage / "back").touch()
        assert_finished(run, storage)
        assert events(storage).count("head_silent") == 1


def test_a_run_survives_a_head_that_is_killed_and_started_again(images: Path, tmp_path: Path, redis: str) -> None:
    storage = tmp_path / "runs"
    with cluster_with_head_apart(tmp_path, {"RAY_REDIS_ADDRESS": redis, **PATIENT}) as cluster:
        run = start_run(cluster, images, storage)
        cluster.kill_head()
        wait_for((storage / "trained on").exists, "the run does not train on")
        time.sleep(AWAY_S)  # for so long a run does without the head
        cluster.restart_head()
        (storage / "back").touch()
        assert_finished(run, storage)


def test_a_node_lost_in_mid_checkpoint_leaves_the_previous_checkpoint(images: Path, s3: S3Server, s3_url: str) -> None:
    summary = summary_of("tests.helpers.lost_node", images, s3_url)
    assert summary["lost_at"] == [5], "the checkpoint of step 10 is not there, and that of step 5 is whole"
    assert (summary["status"], summary["samples_seen"]) == ("finished", 324)
    assert whole_steps(s3_url)[-2:] == [15, 20]
    assert raytrain.audit("run", storage=s3_url).clean
