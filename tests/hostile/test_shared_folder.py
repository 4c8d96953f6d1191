"""A run in a folder that not all nodes share is refused before it trains."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.errors import UsageError
from raytrain.launch.ray.nodes import ClusterNode, NodeResult, refuse_readers, refuse_unshared

NODE = ClusterNode(address="10.0.0.2", id="0a1b2c3d", cpus=1, gpus=0, memory_bytes=1, object_store_bytes=1)


def test_every_node_must_see_the_folder() -> None:
    refuse_unshared("./runs", [NodeResult(NODE, result=True), NodeResult(NODE, result=True)])
    with pytest.raises(UsageError, match=r"--storage is the folder \./runs, which the node 10\.0\.0\.2 .*s3://"):
        refuse_unshared("./runs", [NodeResult(NODE, result=True), NodeResult(NODE, result=False)])
    with pytest.raises(UsageError, match=r"10\.0\.0\.2 did not say whether it sees it: The node did not answer"):
        refuse_unshared("./runs", [NodeResult(NODE, error="The node did not answer; restart Ray there.")])


def test_every_node_that_reads_must_have_raytrain_and_the_images() -> None:
    without_cpus = dataclasses.replace(NODE, cpus=0)
    late = NodeResult[str](NODE, error="The node did not answer within 60 s; check whether it is overloaded.")
    refuse_readers([NodeResult(NODE, result=""), NodeResult(without_cpus, result="/photos"), late])
    with pytest.raises(UsageError, match=r"images are in the folder /photos, and the node 10\.0\.0\.2 .*same place"):
        refuse_readers([NodeResult(NODE, result=""), NodeResult(NODE, result="/photos")])
    lacking = NodeResult[str](NODE, error="The node's Python has no raytrain; install it.", missing_module="raytrain")
    with pytest.raises(UsageError, match=r"node 10\.0\.0\.2 \(0a1b2c3d\) can neither .* has no raytrain; install"):
        refuse_readers([lacking])


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount namespace of its own")
@pytest.mark.parametrize(
    ("hidden", "refused"),
    [
        ("runs", "--storage is the folder {folder}, which the node"),
        ("images", "The images are in the folder {folder}"),
    ],
)
def test_two_nodes_with_folders_of_their_own(hidden: str, refused: str, images: Path, tmp_path: Path) -> None:
    folder = {"images": images, "runs": tmp_path / "runs"}[hidden]
    command = [sys.executable, "-m", "tests.helpers.unshared_cluster", str(images), str(tmp_path / "runs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert refused.format(folder=folder) in printed["refused"]
    assert printed["left"] == []
