"""Waiting for machines that an autoscaler starts: for how many, how long, and what is said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from ray.autoscaler._private.node_provider_availability_tracker import (
    NodeAvailabilityRecord,
    NodeAvailabilitySummary,
    UnavailableNodeInformation,
)
from ray.experimental import internal_kv

from raytrain import TrainConfig, UsageError
from raytrain.launch.placement import Hardware
from raytrain.launch.ray import cluster_watch as module
from raytrain.launch.ray.cluster_watch import wait_for_machines
from raytrain.launch.ray.head_queries import autoscaler_problems


class Cluster:
    """A cluster in which one more machine, with a CPU and a GPU, is there at each look."""

    def __init__(self, gpus: list[int]) -> None:
        self.gpus = gpus
        self.asked: list[dict[str, float]] = []
        self.removed = 0
        self.problems: list[str] = []
        self.head_answers = True

    def hardware(self) -> Hardware:
        gpus = self.gpus.pop(0) if len(self.gpus) > 1 else self.gpus[0]
        return Hardware(1 + gpus, float(gpus), float(gpus), object_store_bytes=1, gpu_types={"L4": gpus})

    def placement_group(self, bundles: list[dict[str, float]]) -> Any:
        self.asked = bundles
        return self

    def wait(self, timeout_s: float) -> bool:
        return self.gpus[0] >= len(self.asked)

    def remove_placement_group(self, group: Any) -> None:
        self.removed += 1


class Immediate:
    """Asks at once, where a Background would ask in a thread."""

    def __init__(self, function: Callable[[float], Any]) -> None:
        self._function = function

    def __call__(self, argument: float) -> Any:
        return self._function(argument)

    def close(self, within_s: float) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster([0, 0, 1, 1, 2])
    monkeypatch.setattr(module, "head_answers", lambda timeout_s: made.head_answers)
    monkeypatch.setattr(module, "Background", Immediate)
    monkeypatch.setattr(module, "cluster_hardware", made.hardware)
    monkeypatch.setattr(module, "autoscaler_problems", lambda: made.problems)
    monkeypatch.setattr(module.ray.util, "placement_group", made.placement_group)
    monkeypatch.setattr(module.ray.util, "remove_placement_group", made.remove_placement_group)
    monkeypatch.setattr(module.time, "monotonic", map(float, itertools.count()).__next__)
    yield made
    assert made.removed == (bool(made.asked) and made.head_answers)


def config(**given: Any) -> TrainConfig:
    return TrainConfig(batch_size=1, **{"device": "cuda", "wait_for_machines_s": 100.0, "workers": 2, **given})


def test_it_asks_for_each_workers_gpu_and_says_what_is_there(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    wait_for_machines(config(), lambda: False)
    assert cluster.asked == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert [message.partition(" after")[0] for message in caplog.messages] == [
        "Waiting for machines: there is room for 0 of 2 workers",
        "Waiting for machines: there is room for 1 of 2 workers",
    ]


@pytest.mark.parametrize(
    "given", [{"wait_for_machines_s": 0.0}, {"workers": "auto", "device": "cpu"}, {"workers": "1..9"}]
)
def test_it_asks_for_nothing_if_it_need_not_wait(given: dict[str, Any], cluster: Cluster) -> None:
    cluster.gpus = [1]
    wait_for_machines(config(**given), lambda: False)
    assert cluster.asked == []


def test_an_elastic_run_waits_for_its_smallest_size(cluster: Cluster) -> None:
    wait_for_machines(config(workers="2..8"), lambda: False)
    assert len(cluster.asked) == 2


def test_it_gives_up_at_the_limit(cluster: Cluster) -> None:
    sentence = "--workers is 9, and after 5 s the cluster has 2 GPUs. `ray status` says why no more machines came"
    with pytest.raises(UsageError, match=sentence):
        wait_for_machines(config(workers=9, wait_for_machines_s=5.0), lambda: False)


def test_the_clouds_reason_is_passed_on(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.problems = ["gpu_8x: You have\nrequested more vCPU capacity than your current vCPU limit of 64 allows."]
    sentence = r"has 2 GPUs\. The autoscaler cannot start machines \(gpu_8x: You have␊requested .* allows\)\. Ask for"
    with pytest.raises(UsageError, match=sentence):
        wait_for_machines(config(workers=9, wait_for_machines_s=5.0), lambda: False)
    assert "vCPU limit of 64" in caplog.messages[0]


def test_it_asks_for_gpus_of_a_type(cluster: Cluster) -> None:
    wait_for_machines(config(device="cuda:L4"), lambda: False)
    assert cluster.asked == [{"CPU": 1.0, "GPU": 1.0, "accelerator_type:L4": 0.001}] * 2


def test_the_autoscalers_problems_are_those_that_ray_status_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    quota = UnavailableNodeInformation("VcpuLimitExceeded", "You have requested more vCPU capacity than allowed.")
    records = {
        "gpu": NodeAvailabilityRecord("gpu", False, 0.0, quota),
        "cpu": NodeAvailabilityRecord("cpu", True, 0.0, None),
    }
    report = {"autoscaler_report": {"node_availability_summary": asdict(NodeAvailabilitySummary(records))}}
    # Ray keeps this report in a place without a public face, and only of a cluster in a cloud.
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key: json.dumps(report).encode())
    assert autoscaler_problems() == ["gpu: You have requested more vCPU capacity than allowed."]
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key: None)
    assert autoscaler_problems() == []


def test_without_a_cluster_there_is_nothing_to_wait_for() -> None:
    with pytest.raises(
        UsageError, match=r"--wait-for-machines-s is 100.0, which is for a Ray cluster, and --backend is local"
    ):
        config(device="cpu", backend="local")


def test_a_stop_ends_the_wait(cluster: Cluster) -> None:
    with pytest.raises(KeyboardInterrupt):
        wait_for_machines(config(workers=9), lambda: True)


def test_a_head_that_does_not_answer_holds_up_neither_a_stop_nor_the_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.gpus = [0]

    def fall_silent() -> bool:
        cluster.head_answers = False
        monkeypatch.setattr(module, "cluster_hardware", lambda: pytest.fail("asked a head that does not answer"))
        return False

    with pytest.raises(UsageError, match="after 5 s the cluster has 0 GPUs"):
        wait_for_machines(config(wait_for_machines_s=5.0), fall_silent)
