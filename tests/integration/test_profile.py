"""A profile of real training steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import raytrain
from raytrain.demo.demo import render_digits
from raytrain.diagnostics.profile import PHASES


def test_a_real_profile_of_two_workers(tmp_path: Path) -> None:
    images = render_digits(tmp_path / "digits", num_images=300)
    config = raytrain.recipes.digits(data=str(images / "train"), workers=2, epochs=1)
    result = raytrain.profile(config, output=str(tmp_path / "traces"))
    assert len(result.workers) == 2
    assert all(worker[name] > 0 for worker in result.workers for name in PHASES)
    assert result.phases["forward"] + result.phases["backward"] < result.step_s
    for trace in result.traces:
        names = [event.get("name") for event in json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]]
        assert names.count("backward") == 10 and names.count("wait for data") == 10
        assert "gloo:all_reduce" in names
    assert {path.name for path in tmp_path.iterdir()} == {"digits", "traces"}  # no run is left
