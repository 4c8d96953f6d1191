"""The use of machines over a run of any length, in a small document that a resume continues."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raytrain.runs.documents import MACHINE_HISTORY, run_store, write_json
from raytrain.runs.machine_history import (
    MAX_POINTS,
    MAX_WORKERS,
    MachineHistory,
    MachineUse,
    read_machine_history,
)


def use(rank: int, cpu: float | None, **more: Any) -> MachineUse:
    return MachineUse(rank=rank, node="a", images_per_s=10.0, data_wait_fraction=0.0, cpu_fraction=cpu, **more)


def cpus(history: MachineHistory, rank: int = 0) -> list[float | None]:
    [worker] = [worker for worker in history.to_json()["workers"] if worker["rank"] == rank]
    return worker["values"]["cpu_fraction"]


def test_each_worker_has_its_values_at_the_times_of_the_run() -> None:
    history = MachineHistory()
    history.add(5.0, [use(0, 0.5, gpu_memory_bytes=2, gpu_memory_total_bytes=8)])
    history.add(10.0, [use(0, None), use(1, 0.75)])
    assert history.to_json() == {
        "every": 1,
        "elapsed_s": [5.0, 10.0],
        "workers": [
            {
                "rank": 0,
                "node": "a",
                "values": {
                    "cpu_fraction": [0.5, None],
                    "data_wait_fraction": [0.0, 0.0],
                    "gpu_memory_fraction": [0.25, None],
                    "images_per_s": [10.0, 10.0],
                },
            },
            {
                "rank": 1,
                "node": "a",
                "values": {
                    "cpu_fraction": [None, 0.75],
                    "data_wait_fraction": [None, 0.0],
                    "images_per_s": [None, 10.0],
                },
            },
        ],
    }


@pytest.mark.not_quick
def test_a_long_run_has_few_points_of_equal_length_that_keep_the_means() -> None:
    history, ranks = MachineHistory(), range(MAX_WORKERS + 5)
    for step in range(2_000):
        history.add(5.0 * step, [use(rank, step / 2_000) for rank in ranks])
    document = history.to_json()
    times = document["elapsed_s"]
    assert MAX_POINTS / 2 <= len(times) < MAX_POINTS
    assert {later - earlier for earlier, later in pairwise(times)} == {5.0 * document["every"]}
    assert len(document["workers"]) == MAX_WORKERS
    assert sum(value or 0 for value in cpus(history)) / len(times) == pytest.approx(0.5, abs=0.01)
    assert len(json.dumps(document)) < 200_000


def test_a_resume_continues_what_is_stored(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "first")
    history = MachineHistory()
    for step in range(2 * MAX_POINTS):
        history.add(5.0 * step, [use(0, 0.5), use(1, None)])
    write_json(store, MACHINE_HISTORY, history.to_json())
    resumed = read_machine_history(store)
    assert resumed.to_json() == history.to_json()
    for each in (history, resumed):
        for step in range(8):
            each.add(9000.0 + step, [use(1, 0.25)])
    assert resumed.to_json() == history.to_json()
    assert cpus(resumed, rank=1)[-1] == 0.25


WHOLE = {"every": 1, "elapsed_s": [5.0], "workers": [{"rank": 0, "node": "a", "values": {"cpu_fraction": [0.5]}}]}


@pytest.mark.parametrize(
    "damage",
    [
        {"every": "1"},
        {"elapsed_s": ["x"]},
        {"elapsed_s": [0.0] * 10**5},
        {"workers": [7, {"rank": "0"}, {"rank": 0, "node": "a", "values": {"cpu_fraction": ["x"]}}]},
        {"workers": [{"rank": 0, "node": "a", "values": {"cpu_fraction": [0.5, 0.5]}}]},
    ],
)
def test_what_is_damaged_is_left_out(damage: dict[str, Any], tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "first")
    write_json(store, MACHINE_HISTORY, {**WHOLE, **damage})
    assert read_machine_history(store).to_json()["workers"] == []
