"""The driver's side of a run's data, or of several runs': what is kept in memory, what is streamed, who reads it."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack

import ray

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.data.images.decode import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.partition import CacheOrder
from raytrain.launch.cache_choice import choose_cache, keeps_shared
from raytrain.launch.placement import Placement
from raytrain.launch.prepare import PreparedRun
from raytrain.launch.ray.coordinator import CoordinatorHandle, RayMonitor, open_coordinator
from raytrain.launch.ray.feed.block_cache import CacheFiller
from raytrain.launch.ray.feed.exchange import Stream
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet
from raytrain.launch.ray.feed.streaming import start_feeders, stop_feeders
from raytrain.launch.ray.nodes import cluster_hardware
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.runs.metric_row import SkippedImage
from raytrain.runs.outcome import EndStatus
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.store import Store

_CPUS_TO_FILL_BESIDE_START = 2.0  # a process that reads takes seconds of a core to start: fewer would delay the workers


class DataFeed:
    """Training and test images on their way to the workers, from :meth:`start` to :meth:`close`."""

    def __init__(self, config: ResolvedConfig, data: Dataset, first_step: int, object_store_bytes: int) -> None:
        data = data.read_by(config)
        cache = choose_cache(config, data, first_step, object_store_bytes)
        kept = ("train", cache.train), ("test", cache.test)
        self.orders: dict[str, CacheOrder] = {name: order for name, order in kept if order is not None}
        """The order in which each cached data set is kept; the others are streamed."""
        self._config = config
        self._data = data.kept_on(cache.disk)
        self._plan = data.plan(config)
        self._first_step = first_step

    def connect(self, coordinator: CoordinatorHandle, credentials: LentCredentials, placement: Placement) -> None:
        """Describe the ``images`` to data tasks and workers, and start the ``feeders``."""
        data = self._data
        self._coordinator = coordinator
        self._credentials = credentials
        self.images = {
            "train": self._image_set(data.train_store, data.train, data.train_format),
            "test": self._image_set(data.test_store, data.test, data.test_format),
        }
        self._placement = placement
        self._cpus = DataCpus(placement.data_cpus * placement.num_workers, placement.task_cpus)
        streams = self.images.keys() - self.orders.keys()
        self.feeders = start_feeders(placement.num_workers, self._cpus) if streams else ()

    def start(self) -> None:
        """Fill the cache, and stream what is not cached: the training images from now on, while the workers start."""
        if "train" not in self.orders:
            expected = Stream(0, 0, "train", self._first_step, self._placement.num_workers)
            loads = self._config.worker_load or (1.0,) * expected.num_workers
            for feeder in self.feeders:
                feeder.open.remote(expected, self.images["train"], self._plan, loads)
        self._filler = CacheFiller(self._coordinator, self._cpus, self.images, self.orders)
        if self._placement.cpus_beside_start >= _CPUS_TO_FILL_BESIDE_START:
            self._filler.start()

    def workers_started(self) -> None:
        """The workers run: the cores that they needed to start are free for reading."""
        self._filler.start()

    def close(self) -> None:
        """Stop reading, and release what was read."""
        self._filler.close()
        stop_feeders(self.feeders)

    def _image_set(self, store: Store, manifest: Manifest, format: ImageFormat) -> ImageSet:
        return ImageSet(
            store=store.with_lent_credentials(self._credentials),
            format=format,
            manifest=ray.put(manifest),
            rows_per_block=manifest.rows_per_block(format.shape),
            coordinator=self._coordinator,
        )


class SharedImages(AbstractContextManager["SharedImages"]):
    """Images that runs of this process share, decoded once, while it is open; ``feed`` is None if they do not fit."""

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, placement: Placement, num_steps: int) -> None:
        data, room = prepared.data, cluster_hardware().object_store_bytes
        self.feed: DataFeed | None = None
        if keeps_shared(config, data, room):
            in_memory = dataclasses.replace(config, cache="memory")
            self.feed = DataFeed(in_memory, data, 0, room)
        with ExitStack() as opened:
            self.coordinator, credentials, self._lender = open_coordinator(
                prepared, opened, num_steps=num_steps, steps_per_epoch=num_steps, num_workers=placement.num_workers
            )
            self._monitor = RayMonitor(self.coordinator, prepared, of="its trials", command="sweep")
            if self.feed is not None:
                self.feed.connect(self.coordinator, credentials, placement)
                self.feed.start()
                opened.callback(self.feed.close)
                self.feed.workers_started()  # runs start at different times, so all images are read at once
            self._opened = opened.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def look(self) -> tuple[Snapshot, str | None]:
        """How many images cannot be used, with a request to stop all runs; and why they have to end, if that is so.

        To be called every second or so, as this also renews the credentials with which images are read. Raises
        :class:`CoordinatorLost` if the coordinator has died.
        """
        snapshot, ending = self._monitor.snapshot(START), self._monitor.ending()
        self._lender.lend_if_due()
        return snapshot, ending.failure

    def skipped_images(self) -> list[SkippedImage]:
        """The images that no run can use."""
        return ray.get(self.coordinator.skipped_images.remote())

    def finish(self, status: EndStatus) -> None:
        """End the list of skipped images: it is in storage when this returns."""
        ray.get(self.coordinator.finish.remote(status, None))
