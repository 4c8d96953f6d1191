"""The devices of a cluster, and the GPUs that a run chooses among them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from raytrain.config import TrainConfig
from raytrain.diagnostics.node_probe import Node, ProbeRequest, probe_node
from raytrain.display.diagnostics_tables import devices_page
from raytrain.errors import UsageError
from raytrain.launch.gpus import Gpu, gpus
from raytrain.launch.ray import connection
from raytrain.launch.ray.connection import Connection
from tests.helpers import fake_nvml
from tests.helpers.node_reports import HEALTHY, HERE

GPUS = (Gpu("NVIDIA H200", 143771 << 20, "580.65.06", "9.0"), Gpu("NVIDIA GB10", 0, "580.65.06", "12.1"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has the two GPUs above."""
    fake_nvml.install(monkeypatch, GPUS)


@pytest.mark.usefixtures("two_gpus")
def test_a_node_reports_its_devices_without_opening_stores() -> None:
    report = probe_node(ProbeRequest(), HERE)
    assert (report.gpus, report.problems, report.identity, report.read_speed) == (GPUS, (), None, None)


@pytest.fixture
def two_nodes() -> tuple[Node, Node]:
    """The devices of a node with GPUs and of one that did not answer."""
    report = replace(HEALTHY, gpus=GPUS, problems=("torch cannot compute on the GPUs.",))
    first = Node("10.0.0.1", "a1b2c3d4", 16, 2, 64 * 10**9, 10**9, report)
    second = Node("10.0.0.2", "e5f6a7b8", 8, 0, 32 * 10**9, 10**9, error="The node sleeps.")
    return first, second


def test_the_table_has_a_line_for_each_device(two_nodes: tuple[Node, Node]) -> None:
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(devices_page(two_nodes), highlight=False)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["10.0.0.1", "a1b2c3d4", "CPU", "16", "CPUs", "64.0", "GB", "–", "–"] in lines
    assert ["GPU", "0", "NVIDIA", "H200", "151", "GB", "580.65.06", "9.0"] in lines
    assert ["GPU", "1", "NVIDIA", "GB10", "shared", "580.65.06", "12.1"] in lines
    shown = [" ".join(line) for line in lines]
    assert "✗ 10.0.0.1: torch cannot compute on the GPUs." in shown and "✗ 10.0.0.2: The node sleeps." in shown


def test_the_summary_has_the_devices_and_problems_of_each_node(two_nodes: tuple[Node, Node]) -> None:
    h200, gb10 = (
        {"number": 0, "name": "NVIDIA H200", "memory_bytes": 143771 << 20, "driver": "580.65.06", "capability": "9.0"},
        {"number": 1, "name": "NVIDIA GB10", "memory_bytes": 0, "driver": "580.65.06", "capability": "12.1"},
    )
    problem = "torch cannot compute on the GPUs."
    nodes = (
        {"address": "10.0.0.1", "id": "a1b2c3d4", "cpus": 16, "memory_bytes": 64 * 10**9, "gpus": [h200, gb10]},
        {"address": "10.0.0.2", "id": "e5f6a7b8", "cpus": 8, "memory_bytes": 32 * 10**9, "gpus": []},
    )
    problems = ([problem], ["The node sleeps."])
    for found, node, sentences in zip(two_nodes, nodes, problems, strict=True):
        assert found.devices() == {**node, "problems": sentences}


class StandIn:
    """In place of a cluster that is started."""

    runs = True
    environments: list[Mapping[str, str]]

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environments.append(environment)

    def close(self) -> None: ...


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, str]]]:
    """The environments with which a cluster would have been started; none is started, and no other is found."""
    environments: list[Mapping[str, str]] = []
    monkeypatch.setattr(StandIn, "environments", environments, raising=False)
    monkeypatch.setattr(connection, "LocalCluster", StandIn)
    monkeypatch.setattr(connection, "is_connected", lambda: False)
    monkeypatch.setattr(connection, "ray_start_address", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield environments
    connection.end_own_ray()


@pytest.mark.not_quick
@pytest.mark.usefixtures("two_gpus")
def test_a_new_cluster_sees_only_the_chosen_gpus(started: list[Mapping[str, str]]) -> None:
    for address, chosen in ((None, None), (None, "1"), ("local", "1,0")):
        Connection(address, gpus=chosen).close()
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # The order of NVML.
    assert started == [{}, {**order, "CUDA_VISIBLE_DEVICES": "1"}, {**order, "CUDA_VISIBLE_DEVICES": "1,0"}]
    assert len(gpus()) == 2


@pytest.mark.not_quick
@pytest.mark.usefixtures("two_gpus")
def test_a_process_keeps_its_ray_until_it_wants_another_one_or_that_one_has_died(
    started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        Connection(None).close()
    assert len(started) == 1
    Connection(None, gpus="1").close()
    monkeypatch.setenv("SOMETHING", "changed")
    Connection(None, gpus="1").close()
    assert len(started) == 3
    monkeypatch.setattr(StandIn, "runs", False)
    Connection(None, gpus="1").close()
    assert len(started) == 4


@pytest.mark.not_quick
@pytest.mark.usefixtures("two_gpus")
def test_a_run_keeps_the_ray_of_its_process_from_others_that_want_another_one(started: list[Mapping[str, str]]) -> None:
    first, second = Connection(None), Connection("local")
    assert len(started) == 1
    for address, chosen in ((None, "1"), ("10.0.0.1:6379", None)):
        with pytest.raises(UsageError, match="A run of this process uses the Ray that it has started"):
            Connection(address, gpus=chosen)
    first.close()
    second.close()
    Connection(None, gpus="1").close()
    assert len(started) == 2


@pytest.mark.not_quick
@pytest.mark.usefixtures("two_gpus")
def test_a_use_that_ends_while_another_one_joins_the_ray_of_the_process_keeps_it_for_others(
    started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Connection(None)
    Connection(None).close()  # such as that of a run whose name is taken
    monkeypatch.setenv("RAY_SOMETHING", "of the join")
    Connection(None).close()
    first.close()
    assert len(started) == 1


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_do_not_exist_are_refused(started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--device is cuda:0,2, but .* reports 2, counted from 0"):
        Connection(None, gpus="0,2")
    fake_nvml.install(monkeypatch, ())
    with pytest.raises(UsageError, match=r"--device is cuda:0, but .* reports none"):
        Connection(None, gpus="0")
    assert started == []


def test_gpus_cannot_be_chosen_for_a_running_cluster(started: list[Mapping[str, str]]) -> None:
    with pytest.raises(UsageError, match="--device is cuda:0,2, and the run uses a Ray cluster that runs already"):
        Connection("10.0.0.1:6379", gpus="0,2")
    assert started == []


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:9", "Connection refused"),
        ("nowhere.invalid:6379", "not known"),
        ("127.0.0.1:x", "x is not a port"),
        ("localhost:99999", "99999 is not a port"),
        ("nothing", "Invalid"),
    ],
)
def test_an_address_where_no_cluster_answers_is_reported_at_once(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests may have joined a cluster, which a process never leaves.
    monkeypatch.setattr(connection, "is_connected", lambda: False)
    with pytest.raises(UsageError, match=rf"^No Ray cluster answers at {address} \(.*{reason}.*\); check --address"):
        Connection(address).connect()


@pytest.mark.parametrize("wrong", ["", "0 2", "0,0", "-1", "0,"])
def test_gpus_must_be_comma_separated_numbers(wrong: str) -> None:
    options: dict[str, Any] = {"batch_size": 1, "learning_rate": 0.1}
    with pytest.raises(UsageError, match="such as cuda:0,2"):
        TrainConfig(device=f"cuda:{wrong}", **options)
    assert TrainConfig(device="cuda:0,2", **options).gpus == "0,2"
