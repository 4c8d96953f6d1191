"""A profile of real training steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.demo.demo import render_digits
from raytrain.diagnostics.profile import PHASES
from raytrain.errors import UsageError
from tests.helpers.small_runs import make_images


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


_LOOP = """
import torch
from torch.nn.functional import cross_entropy


def train(run, most=100):
    model = run.prepare(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for number, batch in enumerate(epoch, 1):
            loss = cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == most:
                return


def three_steps(run):
    train(run, most=3)
"""


def test_a_loop_in_a_file_is_profiled_and_one_that_ends_early_is_refused(tmp_path: Path) -> None:
    (images := tmp_path / "images").mkdir()
    make_images(images, 40)
    (tmp_path / "own_loop.py").write_text(_LOOP)
    (tmp_path / "worker-pool.json").write_text("{}")
    options: dict[str, Any] = {"data": str(images), "image_size": 8, "batch_size": 2, "workers": 1}

    config = raytrain.recipes.custom(loop=f"{tmp_path}/own_loop.py:train", **options)
    (trace,) = raytrain.profile(config, output=tmp_path).traces
    assert trace == str(tmp_path / "worker-0.trace.json.gz") and Path(trace).exists()

    short = raytrain.recipes.custom(loop=f"{tmp_path}/own_loop.py:three_steps", **options)
    with pytest.raises(UsageError, match="ended after 3 steps, and a profile takes 15"):
        raytrain.profile(short, output=tmp_path)
    assert not Path(trace).exists()  # an old trace would be taken for the new one
    assert (tmp_path / "worker-pool.json").read_text() == "{}"  # somebody else's file
