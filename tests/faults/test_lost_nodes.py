"""A run whose cluster loses the node of its workers in mid-checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import raytrain
from raytrain.demo.s3_server import S3Server
from tests.faults.test_failing_storage import whole_steps
from tests.faults.test_killed_processes import summary_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_node_lost_in_mid_checkpoint_leaves_the_previous_checkpoint(images: Path, s3: S3Server, s3_url: str) -> None:
    summary = summary_of("tests.helpers.lost_node", images, s3_url)
    assert summary["lost_at"] == [5], "the checkpoint of step 10 is not there, and that of step 5 is whole"
    assert (summary["status"], summary["samples_seen"]) == ("finished", 324)
    assert whole_steps(s3_url)[-2:] == [15, 20]
    assert raytrain.audit("run", storage=s3_url).clean
