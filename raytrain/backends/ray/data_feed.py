"""The driver's side of a run's data: what of it is kept in memory and what is streamed, and who reads it."""

from __future__ import annotations

from typing import Any

import ray

from raytrain.backends.ray.block_cache import CacheFiller
from raytrain.backends.ray.cluster import Placement
from raytrain.backends.ray.coordinator import with_cluster_credentials
from raytrain.backends.ray.ingest import DataCpus, ImageSet
from raytrain.backends.ray.stream_queues import Stream
from raytrain.backends.ray.streaming import StreamReader
from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan, Cursor
from raytrain.data.block_order import CacheOrder
from raytrain.data.dataset import Dataset
from raytrain.data.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.storage.base import Store

_CACHE_FRACTION = 0.4  # of the smallest node's object store; the rest is for what streams through


class DataFeed:
    """Training and test images on their way to the workers, from :meth:`begin` to :meth:`close`.

    Raises UsageError where ``--cache memory`` asks for more than an object store has.
    """

    def __init__(self, config: TrainConfig, data: Dataset, plan: BatchPlan, test_plan: BatchPlan, first_step: int, object_store_bytes: int) -> None:
        self._config = config
        self._data = data
        self._plan = plan
        self._test_plan = test_plan
        self._first_step = first_step
        self.train_cached, self.test_cached = self._what_is_cached(object_store_bytes)

    @property
    def origin(self) -> Cursor | None:
        """Where the cached training images begin; None where they are streamed."""
        return self._plan.cursor(self._first_step) if self.train_cached else None

    def image_sets(self, coordinator: Any) -> tuple[ImageSet, ImageSet]:
        """What data tasks and workers are told of the training images, and of the test images."""
        data = self._data
        self._coordinator = coordinator
        self._train, self._test = self._image_set(data.train_store, data.train), self._image_set(data.test_store, data.test)
        return self._train, self._test

    def begin(self, placement: Placement) -> None:
        """Fill the cache; stream what is not cached, the training images from now on, while the workers start."""
        cpus = DataCpus(placement.data_cpus * placement.num_workers, placement.task_cpus)
        foreseen = None if self.train_cached else Stream(0, 0, "train", self._first_step, placement.num_workers)
        sets = {"train": (self._train, self._plan), "test": (self._test, self._test_plan)}
        self._streamer = StreamReader(self._coordinator, cpus, sets, self._config.worker_load or (), foreseen)
        self._filler = CacheFiller(self._coordinator, cpus, self._filling())

    def go_on(self) -> None:
        """The workers have started."""
        self._filler.go_on()

    def close(self) -> None:
        """Read no more, and let go of what was read."""
        self._filler.close()
        self._streamer.close()

    def _image_set(self, store: Store, manifest: Manifest) -> ImageSet:
        entered = with_cluster_credentials(store, self._coordinator)
        return ImageSet(entered, self._data.shape, ray.put(manifest), len(manifest), self._coordinator, manifest.packing is not None)

    def _filling(self) -> dict[str, tuple[ImageSet, CacheOrder]]:
        filling: dict[str, tuple[ImageSet, CacheOrder]] = {}
        if self.origin is not None:
            filling["train"] = (self._train, CacheOrder(self._plan, self.origin, self._train.rows_per_block))
        if self.test_cached:
            filling["test"] = (self._test, CacheOrder(self._test_plan, Cursor(), self._test.rows_per_block))
        return filling

    def _what_is_cached(self, there: int) -> tuple[bool, bool]:
        """Whether the training images are kept in memory, and the test images."""
        train_bytes, test_bytes = (len(each) * self._data.shape.num_bytes for each in (self._data.train, self._data.test))
        if self._config.cache == "memory" and train_bytes + test_bytes > there:
            raise UsageError(
                f"--cache is memory, and the decoded images take {(train_bytes + test_bytes) / 1e9:.1f} GB where a node's object store "
                f"has {there / 1e9:.1f} GB; use --cache auto."
            )
        if self._config.cache == "auto":
            room = _CACHE_FRACTION * there
            used_again = self._plan.num_steps - self._first_step > self._plan.steps_per_epoch
            return used_again and train_bytes + test_bytes <= room, test_bytes <= room
        return self._config.cache == "memory", self._config.cache == "memory"
