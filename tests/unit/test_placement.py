"""GPUs of a type that the user names, and CPUs beside the workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raytrain import TrainConfig, UsageError
from raytrain.launch import placement
from raytrain.launch.gpus import Gpu
from raytrain.launch.placement import Hardware, place
from raytrain.launch.ray import nodes
from raytrain.loader import machine

MIXED = Hardware(3, 64.0, 6.0, 10**9, gpu_types={"L4": 4.0, "T4": 2.0})


def config(**given: Any) -> TrainConfig:
    return TrainConfig(batch_size=8, **given)


def test_workers_ask_for_the_type_and_count_only_its_gpus() -> None:
    placement = place(config(device="cuda:L4"), MIXED)
    assert (placement.device, placement.num_workers) == ("cuda", 4)
    asked = nodes.worker_resources(placement.device, placement.cpus, placement.accelerator_type)
    assert asked == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:L4": 0.001}
    assert place(config(), MIXED).num_workers == 6 and nodes.worker_resources("cuda", 2.0, None) == {
        "CPU": 2.0,
        "GPU": 1.0,
    }


def test_too_few_gpus_of_the_type_and_a_type_that_is_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="the cluster has 2 T4 GPUs; ask for at most 2"):
        place(config(device="cuda:T4", workers=3), MIXED)
    with pytest.raises(UsageError, match="--device is cuda:A100, and the cluster has 4 L4, 2 T4; name a type"):
        place(config(device="cuda:A100"), MIXED)


def test_what_this_machine_lacks_is_said_of_it_and_not_of_a_cluster() -> None:
    machine = Hardware(num_nodes=1, cpus=2, gpus=0, object_store_bytes=0)  # as a run knows it before its Ray starts
    with pytest.raises(UsageError, match="this machine has no GPU; use --device cpu, or name a cluster by --address"):
        place(config(device="cuda"), machine)
    with pytest.raises(UsageError, match="this machine has 2 CPUs; ask for at most 8\\."):
        place(config(workers=9), machine)


def test_without_a_cluster_a_refusal_speaks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Hardware(1, cpus=2.0, gpus=0.0, object_store_bytes=10**9)
    with pytest.raises(UsageError, match=r"^--workers is 9, and this machine has 2 CPUs; ask for at most 8.$"):
        place(config(backend="local", workers=9), alone)
    with pytest.raises(UsageError, match=r"^--device is cuda, and this machine has no GPU; use --device cpu.$"):
        place(config(backend="local", device="cuda"), alone)
    monkeypatch.setattr(placement, "gpus", lambda: (Gpu("T4", 16 * 10**9, "550", "7.5"),))
    with pytest.raises(UsageError, match=r"has no GPU \(of 1, CUDA_VISIBLE_DEVICES hides all\); use --device cpu.$"):
        place(config(backend="local", device="cuda"), alone)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_the_cores_of_a_container_are_those_of_its_limit(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    access, read_text = os.access, Path.read_text

    def here(path: str | Path) -> Path:
        return Path(str(path).replace("/sys/fs/cgroup", str(tmp_path)))

    monkeypatch.setattr(os, "access", lambda path, mode: access(here(path), mode))
    monkeypatch.setattr(Path, "read_text", lambda path: read_text(here(path)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert machine.cores() == cores


def test_the_types_are_those_of_rays_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = [
        {"CPU": 8.0, "GPU": 4.0, "accelerator_type:L4": 1.0},
        {"CPU": 8.0, "GPU": 1.0, "accelerator_type:T4": 1.0},
        {"CPU": 8.0, "GPU": 2.0, "accelerator_type:L4": 1.0},
        {"CPU": 8.0},
    ]
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": each} for each in resources])
    found = nodes.cluster_hardware()
    assert found.gpu_types == {"L4": 6, "T4": 1} and found.gpus == 7


@pytest.mark.parametrize(("cores", "workers", "free"), [(2, 2, 0), (2, 1, 1), (8, 6, 2), (64, 8, 56), (2, 4, -2)])
def test_cores_that_starting_workers_leave_free(cores: int, workers: int, free: int) -> None:
    placement = place(config(workers=workers, device="cpu"), Hardware(1, float(cores), 0.0, 10**9))
    assert round(placement.cpus_beside_start) == free
