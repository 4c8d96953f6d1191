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
    from raytrain.launch.ray.feed.exchange import Stream

    store = open_store(str(tmp_path / "run"))
    coordinator: Any = start_coordinator("run", store, num_steps=10, steps_per_epoch=5, num_workers=NUM_WORKERS)
    try:
        streams = [Stream(0, 0, dataset, 0, NUM_WORKERS) for dataset in ("train", "test")]
        ray.get([coordinator.open_stream.remote(stream) for stream in streams], timeout=ANSWER_S)
        stop = coordinator.wait_for_stop_request.remote(FOR_EVER_S)
        train, _ = (
            [coordinator.take.remote(stream, rank, FOR_EVER_S) for rank in range(NUM_WORKERS)] for stream in streams
        )
        keys = ("AKIAEXAMPLE", "secret", None, None)
        ray.get(coordinator.lend.remote("ticket", "s3", keys), timeout=ANSWER_S)
        assert ray.get(coordinator.credentials.remote("ticket", "s3"), timeout=ANSWER_S) == keys
        ray.get(coordinator.flush.remote(), timeout=ANSWER_S)
        pushes = [coordinator.push.remote(streams[0], rank, [rank], 4) for rank in range(NUM_WORKERS)]
        assert ray.get(pushes, timeout=ANSWER_S) == [True] * NUM_WORKERS
        assert ray.get(train, timeout=ANSWER_S) == [[rank] for rank in range(NUM_WORKERS)]
        coordinator.request_stop.remote(StopReason("caller", "enough"))
        assert ray.get(stop, timeout=ANSWER_S) == StopReason("caller", "enough")
    finally:
        stop_coordinator(coordinator)
