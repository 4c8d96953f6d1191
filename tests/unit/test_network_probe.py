"""The network between nodes: which interface, and how fast they add up a tensor."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from raytrain.diagnostics import network_probe
from raytrain.diagnostics.doctor import DoctorReport
from raytrain.diagnostics.network_probe import AllReduce, interface_of
from raytrain.display.diagnostics_tables import doctor_page
from raytrain.errors import UsageError
from raytrain.launch.ray.nodes import ClusterNode, NodeResult
from tests.helpers.node_reports import HERE

pytestmark = pytest.mark.not_quick


def test_a_node_knows_its_interface_by_its_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None and loopback.name.startswith("lo")
    assert interface_of("203.0.113.9") is None  # an address for documentation, which no machine has


def test_a_single_node_has_nobody_to_add_up_with() -> None:
    assert network_probe.measure_all_reduce([0]) is None


def test_nodes_add_up_a_tensor_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    found = all_reduce_of(two_nodes_here, monkeypatch)
    assert found.backend == "gloo" and found.problem is None
    assert found.bytes_per_s is not None and found.bytes_per_s > 0
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(doctor_page(DoctorReport(None, "/runs", {}, None, (), found, (), ())), highlight=False)
    assert re.search(r"all-reduce +[\d,]+ MB/s between 2 nodes with gloo", console.export_text())


@pytest.mark.slow  # gloo's own patience
def test_nodes_that_cannot_meet_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    found = all_reduce_of(two_nodes_here, monkeypatch)
    assert found.bytes_per_s is None and found.problem is not None
    assert found.problem.startswith("The nodes could not add up a tensor over the network with gloo (")
    assert "none0" in found.problem and "open all TCP ports between the nodes" in found.problem


def all_reduce_of(nodes: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> AllReduce:
    monkeypatch.setattr(network_probe, "run_on_each_node", nodes)
    found = network_probe.measure_all_reduce([0, 0])
    assert found is not None
    return found


def two_nodes_here(function: Callable[[ClusterNode], Any], timeout_s: float) -> list[NodeResult[Any]]:
    """What ``run_on_each_node`` does, for two nodes that are both this machine."""
    nodes = [dataclasses.replace(HERE, id=name) for name in "ab"]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(partial(result_on, function), nodes))


def result_on(function: Callable[[ClusterNode], Any], node: ClusterNode) -> NodeResult[Any]:
    try:
        return NodeResult(node, result=function(node))
    except UsageError as error:
        return NodeResult(node, error=str(error))
