"""Those who wait: hundreds of workers hinder nobody, a cache ends with its run, a command hears that a process died."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder
from raytrain.errors import RaytrainError
from raytrain.runs.outcome import StopReason
from raytrain.storage.open import open_store
from tests.helpers.waiting import wait_for

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

NUM_WORKERS = 300
FOR_EVER_S = 3600.0
ANSWER_S = 120.0
MORE_CPUS_THAN_THERE_ARE = 1000.0


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


def test_a_cache_whose_tasks_find_no_room_ends_when_it_is_closed(tmp_path: Path) -> None:
    """A driver that leaves Ray while one of its threads waits there ends with a segmentation fault."""
    from raytrain.launch.ray.feed.block_cache import CacheFiller
    from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet
    from raytrain.launch.ray.head_queries import num_waiting_tasks

    coordinator: Any = None  # which hears of blocks that are read: none is
    images = ImageSet(open_store(str(tmp_path)), ImageFormat(ImageShape(4, 4, 3)), None, 1, coordinator)
    order = CacheOrder(BatchPlan(6, 2, 1, seed=0), 0, images.rows_per_block)
    cpus = DataCpus(MORE_CPUS_THAN_THERE_ARE, MORE_CPUS_THAN_THERE_ARE)
    filler = CacheFiller(coordinator, cpus, {"validation": images}, {"validation": order})
    filler.start()
    wait_for(lambda: num_waiting_tasks(cpus.task, ANSWER_S) > 0)
    filler.close()
    assert "cache" not in [thread.name for thread in threading.enumerate()]


def test_a_command_that_waits_for_a_process_that_has_died_says_so() -> None:
    import ray

    from raytrain.launch.ray.serve_credentials import serving_credentials

    def work() -> None:
        with serving_credentials([]) as (served, _):
            ray.kill(served.server)
            ray.get(served.server.credentials.remote("ticket", "s3"))

    with pytest.raises(RaytrainError, match=r"^A process that works for this command in the cluster has died: "):
        work()
