"""What a network prints while it is evaluated is shown, also from a Ray cluster, and never beside a command's JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import raytrain
from tests.helpers.small_runs import local_config, make_images

NETWORK = """
import sys

import torch


class Network(torch.nn.Sequential):
    def forward(self, images):
        if not self.training:
            print("measures", len(images))
            print("beware", file=sys.stderr)
        return super().forward(images)


def network(num_classes):
    return Network(torch.nn.Flatten(), torch.nn.Linear(12 * 12 * 3, num_classes))
"""
EVALUATE = ["evaluate", "run", "--trust", "--json"]


@pytest.mark.parametrize("address", ["here", pytest.param("local", marks=pytest.mark.slow)])  # which starts a Ray
def test_a_command_shows_what_a_network_prints_on_standard_error(address: str, tmp_path: Path) -> None:
    (tmp_path / "networks.py").write_text(NETWORK)
    (tmp_path / "images").mkdir()
    images = make_images(tmp_path / "images")
    options = {"model": f"{tmp_path}/networks.py:network", "workers": 1, "epochs": 1}
    raytrain.train(local_config(images, tmp_path, validation_fraction=0.2, **options), view=lambda snapshot: None)

    command = [sys.executable, "-m", "raytrain", *EVALUATE, "--storage", str(tmp_path), "--data", str(images)]
    command += [] if address == "here" else ["--address", address]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] == 90
    worker = "" if address == "here" else "[worker0]:"
    assert {f"{worker}measures 90", f"{worker}beware"} <= set(done.stderr.splitlines())
