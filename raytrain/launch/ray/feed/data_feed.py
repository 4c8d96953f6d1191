"""The driver's side of a run's data: what is kept in memory, what is streamed, and who reads it."""

from __future__ import annotations

from contextlib import ExitStack

import ray

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.data.images.decode import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.batch_plan import BatchPlan, Cursor
from raytrain.data.plan.partition import CacheOrder
from raytrain.launch.cache_choice import choose_cache
from raytrain.launch.placement import Placement
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.feed.block_cache import CachedImages, CacheFiller
from raytrain.launch.ray.feed.exchange import Stream
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet
from raytrain.launch.ray.feed.streaming import StreamReader
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.store import Store

_CPUS_TO_FILL_BESIDE_START = 2.0  # a process that reads takes seconds of a core to start: fewer would delay the workers


class DataFeed:
    """Training and test images on their way to the workers, from :meth:`start` to :meth:`close`.

    ``keeps_images``: whether the decoded images stay in the cluster for the next run.

    Raises UsageError if ``--cache memory`` asks for more than an object store has.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        data: Dataset,
        plan: BatchPlan,
        test_plan: BatchPlan,
        first_step: int,
        object_store_bytes: int,
    ) -> None:
        choice = choose_cache(config, data, plan, first_step, object_store_bytes)
        self._config = config
        self._data = data.kept_on(choice.disk)
        self._plan = plan
        self._test_plan = test_plan
        self._first_step = first_step
        self._choice = choice

    @property
    def orders(self) -> dict[str, CacheOrder]:
        """The order in which each cached data set is kept."""
        return {name: cached.order for name, cached in self._cached.items()}

    def connect(self, coordinator: CoordinatorHandle, credentials: LentCredentials) -> None:
        """Describe the images to data tasks and workers, as ``train`` and ``test``.

        ``credentials`` are for processes whose node has no role of its own.
        """
        data = self._data
        self._coordinator = coordinator
        self._credentials = credentials
        self.train = self._image_set(data.train_store, data.train, data.train_format)
        self.test = self._image_set(data.test_store, data.test, data.test_format)
        self._cached = self._to_cache()

    def start(self, placement: Placement) -> None:
        """Fill the cache, and stream what is not cached: the training images from now on, while the workers start."""
        cpus = DataCpus(placement.data_cpus * placement.num_workers, placement.task_cpus)
        expected = None if "train" in self._cached else Stream(0, 0, "train", self._first_step, placement.num_workers)
        sets = {"train": (self.train, self._plan), "test": (self.test, self._test_plan)}
        with ExitStack() as opened:
            streams = StreamReader(self._coordinator, cpus, sets, self._config.worker_load or (), expected)
            opened.callback(streams.close)
            self._filler = CacheFiller(self._coordinator, cpus, self._cached)
            opened.callback(self._filler.close)
            if placement.cpus_beside_start >= _CPUS_TO_FILL_BESIDE_START:
                self._filler.start()
            self._opened = opened.pop_all()

    def workers_started(self) -> None:
        """The workers run: the cores that they needed to start are free for reading."""
        self._filler.start()

    def close(self) -> None:
        """Stop reading, and release what was read."""
        self._opened.close()

    def _image_set(self, store: Store, manifest: Manifest, format: ImageFormat) -> ImageSet:
        return ImageSet(
            store=store.with_lent_credentials(self._credentials),
            format=format,
            manifest=ray.put(manifest),
            num_images=len(manifest),
            coordinator=self._coordinator,
            packed=manifest.packing is not None,
        )

    def _to_cache(self) -> dict[str, CachedImages]:
        to_cache: dict[str, CachedImages] = {}
        if self._choice.train:
            origin = self._plan.cursor(self._first_step)
            to_cache["train"] = CachedImages(self.train, CacheOrder(self._plan, origin, self.train.rows_per_block))
        if self._choice.test:
            order = CacheOrder(self._test_plan, Cursor(), self.test.rows_per_block)
            to_cache["test"] = CachedImages(self.test, order)
        return to_cache
