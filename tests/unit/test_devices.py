"""The table of devices, and the GPUs that a run chooses among them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from raytrain.backends.ray.cluster import Connection
from rich.console import Console

from raytrain.backends.ray import cluster
from raytrain.config import TrainConfig
from raytrain.diagnostics.devices import Devices
from raytrain.diagnostics.doctor import Node
from raytrain.diagnostics.node_probe import Gpu, NodeReport, ProbeRequest, examine, gpus
from raytrain.errors import UsageError

SMI = "NVIDIA H200, 143771, 570.86.15, 9.0\nNVIDIA GB10, [N/A], 580.65.06, 12.1"
GPUS = (Gpu("NVIDIA H200", 143771 << 20, "570.86.15", "9.0"), Gpu("NVIDIA GB10", 0, "580.65.06", "12.1"))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has the two GPUs above, as far as nvidia-smi says."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("nvidia_smi")
def test_a_node_tells_its_devices_without_being_asked_of_stores() -> None:
    answer = examine(ProbeRequest(None, None, None, ""), num_gpus=0)
    assert (answer.gpus, answer.problems, answer.identity, answer.reading) == (GPUS, (), None, None)


def test_the_table_has_a_line_for_each_device() -> None:
    answer = NodeReport({}, GPUS, None, None, None, False, ("torch cannot compute on the GPUs.",))
    first = Node("10.0.0.1", "a1b2c3d4", 16, 2, 64 * 10**9, 10**9, answer)
    second = Node("10.0.0.2", "e5f6a7b8", 8, 0, 32 * 10**9, 10**9, silence="The node sleeps.")
    found = Devices((first, second))
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(found, highlight=False)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["10.0.0.1", "a1b2c3d4", "CPU", "16", "of", "them", "64.0", "GB"] in lines
    assert ["GPU", "0", "NVIDIA", "H200", "151", "GB", "570.86.15", "9.0"] in lines
    assert ["GPU", "1", "NVIDIA", "GB10", "shared", "580.65.06", "12.1"] in lines
    told = [" ".join(line) for line in lines]
    assert "✗ 10.0.0.1: torch cannot compute on the GPUs." in told and "✗ 10.0.0.2: The node sleeps." in told
    nodes = found.summary()["nodes"]
    assert [(gpu["number"], gpu["capability"]) for gpu in nodes[0]["gpus"]] == [(0, "9.0"), (1, "12.1")]
    assert (nodes[1]["gpus"], nodes[1]["problems"]) == ([], ["The node sleeps."])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """The environments that a Ray of our own was to be started with; nothing is started, and no other Ray is there."""
    environments: list[Mapping[str, str]] = []
    monkeypatch.setattr(cluster, "LocalCluster", environments.append)
    monkeypatch.setattr(cluster, "is_connected", lambda: False)
    monkeypatch.setattr(cluster, "_local_cluster_runs", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return environments


@pytest.mark.usefixtures("nvidia_smi")
def test_a_ray_of_our_own_sees_the_chosen_gpus_only(started: list[Mapping[str, str]]) -> None:
    Connection(None)
    Connection(None, gpus="1")
    Connection("local", gpus="1,0")
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # in which nvidia-smi counts
    assert started == [{}, {**order, "CUDA_VISIBLE_DEVICES": "1"}, {**order, "CUDA_VISIBLE_DEVICES": "1,0"}]
    assert len(gpus()) == 2


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_that_are_not_there_are_refused(started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--gpus is 0,2, .* there are 2, counted from 0"):
        Connection(None, gpus="0,2")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"--gpus is 0, .* there is none"):
        Connection(None, gpus="0")
    assert started == []


def test_somebody_elses_cluster_has_its_gpus_chosen(started: list[Mapping[str, str]]) -> None:
    with pytest.raises(UsageError, match="--gpus is 0,2, and the run goes to a Ray cluster that runs already"):
        Connection("10.0.0.1:6379", gpus="0,2")
    assert started == []


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:9", "Connection refused"), ("nowhere.invalid:6379", "not known"), ("127.0.0.1:x", "x is no port"), ("nothing", "Invalid")],
)
def test_an_address_where_no_cluster_answers_is_told_at_once(address: str, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"^No Ray cluster answers at {address} \(.*{reason}.*\); check --address"):
        Connection(address).connect()


@pytest.mark.parametrize("wrong", ["", "0 2", "0,0", "-1", "all", "0,"])
def test_numbers_with_commas_are_wanted(wrong: str) -> None:
    options: dict[str, Any] = {"batch_size": 1, "learning_rate": 0.1}
    with pytest.raises(UsageError, match="such as 0,2"):
        TrainConfig(gpus=wrong, **options)
    assert TrainConfig(gpus="0,2", **options).gpus == "0,2"
