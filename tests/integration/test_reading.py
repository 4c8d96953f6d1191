"""What reading leaves to the workers of a run."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet
from raytrain.launch.ray.feed.streaming import block_refs
from raytrain.storage.open import open_store
from tests.helpers.waiting import wait_for


@dataclass(frozen=True)
class Slow:
    """An order whose blocks are not known before ``released`` is there; a file tells of each that is asked for."""

    folder: Path

    @property
    def released(self) -> Path:
        return self.folder / "released"

    def __len__(self) -> int:
        return 20

    def draws(self, number: int) -> Any:
        (self.folder / str(number)).touch()
        wait_for(self.released.exists)
        raise RuntimeError("released")

    def epoch(self, number: int) -> int:
        return 0

    def priority(self, number: int) -> int:
        return number


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_workers_find_room_while_the_first_blocks_are_read(images: Path, tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayTaskError
    from ray.util import placement_group, remove_placement_group

    store = open_store(str(images))
    manifest = build_manifest(store)
    shape = ImageShape(12, 12, 3)
    nobody: Any = None
    image_set = ImageSet(store, ImageFormat(shape), ray.put(manifest), manifest.rows_per_block(shape), nobody)
    order: Any = Slow(tmp_path)
    blocks = block_refs(image_set, [order], DataCpus(all=1.0, task=0.5))  # of 2 CPUs

    def read() -> None:
        with suppress(RayTaskError):  # when the test is over
            for _, ref in blocks:
                ray.get(ref)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_for(lambda: len(list(tmp_path.iterdir())) >= 4)  # two of the first blocks, and two of the pipeline
        workers = placement_group([{"CPU": 0.5}] * 2)
        assert workers.wait(60)
        remove_placement_group(workers)
    finally:
        order.released.touch()
        reader.join(60)
