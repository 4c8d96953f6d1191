"""Hundreds of workers that wait for data keep nobody else from an answer of the run's coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain.runs.outcome import StopReason
from raytrain.storage.open import open_store

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

NUM_WORKERS = 300
FOR_EVER_S = 3600.0
ANSWER_S = 120.0


def test_300_waiting_workers_hinder_neither_keys_nor_data_nor_a_stop(tmp_path: Path) -> None:
    import ray

    from raytrain.launch.ray.coordinator import start_coordinator, stop_coordinator

    store = open_store(str(tmp_path / "run"))
    coordinator: Any = start_coordinator("run", store, num_steps=10, steps_per_epoch=5, num_workers=NUM_WORKERS)
    try:
        stop = coordinator.wait_for_stop_request.remote(FOR_EVER_S)
        train, _ = (
            [coordinator.blocks.remote(dataset, 0, FOR_EVER_S) for _ in range(NUM_WORKERS)]
            for dataset in ("train", "test")
        )
        keys = ("AKIAEXAMPLE", "secret", None, None)
        ray.get(coordinator.lend.remote("ticket", "s3", keys), timeout=ANSWER_S)
        assert ray.get(coordinator.credentials.remote("ticket", "s3"), timeout=ANSWER_S) == keys
        ray.get(coordinator.flush.remote(), timeout=ANSWER_S)
        coordinator.add_blocks.remote("train", ["block"])
        assert ray.get(train, timeout=ANSWER_S) == [["block"]] * NUM_WORKERS
        coordinator.request_stop.remote(StopReason("caller", "enough"))
        assert ray.get(stop, timeout=ANSWER_S) == StopReason("caller", "enough")
    finally:
        stop_coordinator(coordinator)
