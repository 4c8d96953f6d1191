"""The driver's side of the images of one run, or of several: which are cached, which streamed, and who reads them."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import ray

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.data.images.image_format import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.partition import CacheOrder
from raytrain.launch.placement import Placement
from raytrain.launch.prepare import PreparedRun
from raytrain.launch.ray.coordinator import CoordinatorHandle, RayMonitor, needs_coordinator, open_coordinator
from raytrain.launch.ray.feed.block_cache import CacheFiller
from raytrain.launch.ray.feed.ingest import DataCpus, ImageSet
from raytrain.launch.ray.feed.streaming import FeederHandle, Stream, start_feeders, stop_feeders
from raytrain.launch.ray.head_queries import raylet_answers
from raytrain.launch.ray.nodes import check_readers, cluster_hardware
from raytrain.launch.ray.ray_errors import LOST_ACTOR
from raytrain.loader.choose_cache import choose_cache, keeps_shared
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.runs.metric_row import SkippedImage
from raytrain.runs.outcome import EndStatus
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.store import Store

_CPUS_TO_FILL_BESIDE_START = 2.0  # with fewer free CPUs, starting processes that read would delay the workers


class DataFeed:
    """The images of all parts on their way to the workers.

    Its methods are called in this order: the constructor decides which images are cached in memory or on disks;
    :meth:`connect` starts the feeders; from :meth:`start` on, images are read; from :meth:`fill_cache` on, tasks may
    use the cores that starting workers needed; :meth:`close` stops reading.

    ``first_step`` is the step with which the run begins or resumes, ``object_store_bytes`` the size of the smallest
    object store of the cluster. The constructor raises UsageError if the images do not fit where ``--cache`` says.
    """

    def __init__(self, config: ResolvedConfig, data: Dataset, first_step: int, object_store_bytes: int) -> None:
        self.feeders: tuple[FeederHandle, ...] = ()
        self._filler: CacheFiller | None = None
        # Decide what is kept in the object store, and what on the disks of the machines.
        data = data.decoded_as(config)
        cache = choose_cache(config, data, first_step, object_store_bytes)
        self.orders: dict[str, CacheOrder] = {
            part: order for part in data.parts if (order := cache.order(part)) is not None
        }
        """The order of the blocks of each part that is cached in memory; the others are streamed."""
        self._config = config
        self._data = data.kept_on(cache.disk)
        self._plan = data.plan(config)
        self._first_step = first_step

    def connect(self, coordinator: CoordinatorHandle, credentials: LentCredentials, placement: Placement) -> None:
        """Put the manifests into the object store, and start the feeders, if images are streamed.

        Sets ``images``, which describes each part to data tasks and workers, and ``feeders``. Unreadable images are
        reported to the ``coordinator``, and storage is read with ``credentials``. Raises UsageError if some node does
        not have the images.
        """

        def image_set(store: Store, manifest: Manifest, format: ImageFormat) -> ImageSet:
            return ImageSet(
                store=store.with_lent_credentials(credentials),
                format=format,
                manifest=ray.put(manifest),
                rows_per_block=manifest.rows_per_block(format.shape, as_files=format.as_files),
                coordinator=coordinator,
                file_bytes=manifest.mean_bytes if format.as_files else None,
            )

        data = self._data
        check_readers((store, images) for store, images, _ in data.parts.values())
        self._coordinator = coordinator
        self.images = {part: image_set(*inputs) for part, inputs in data.parts.items()}
        # Feeders start now, at the same time as the workers, because both take seconds.
        self._placement = placement
        self._cpus = DataCpus(placement.data_cpus * placement.num_workers, placement.task_cpus)
        is_streaming = self.images.keys() != self.orders.keys()
        self.feeders = start_feeders(placement.num_workers, self._cpus) if is_streaming else ()

    def start(self) -> None:
        """Fill the cache, and stream the images that are not cached, from now on, while the workers start."""
        if "train" not in self.orders:
            # Begin with the stream that the first attempt will ask for. If it finds room for fewer workers, it will ask
            # for another stream, which ends this one.
            expected = Stream(0, 0, "train", self._first_step, self._placement.num_workers)
            loads = self._config.loads(expected.num_workers)
            for feeder in self.feeders:
                feeder.read_stream.remote(expected, self.images["train"], self._plan, loads)
        self._filler = CacheFiller(self._coordinator, self._cpus, self.images, self.orders)
        if self._placement.cpus_beside_start >= _CPUS_TO_FILL_BESIDE_START:
            self._filler.start()

    @property
    def task_cpus(self) -> tuple[float, float]:
        """The CPUs of a data task that fills the cache, and those of one that reads a stream."""
        return self._cpus.task, self._cpus.streamed_task

    def fill_cache(self) -> None:
        """Read the cached images by tasks from now on, because the workers have started."""
        assert self._filler is not None
        self._filler.start()

    def close(self) -> None:
        """Stop reading, release the blocks, and end the feeders, as far as they have started. May be called twice."""
        if self._filler is not None:
            self._filler.close()
        feeders, self.feeders = self.feeders, ()
        stop_feeders(feeders)


class RaySharedImages(AbstractContextManager["RaySharedImages"]):
    """Images that runs of this process share while this is open, decoded once, with a coordinator of their own.

    ``feed`` is None if they do not fit into memory; then each run reads its own. ``prepared`` and ``config`` are those
    of the sweep, ``num_steps`` counts the steps of all of its runs together.
    """

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, placement: Placement, num_steps: int) -> None:
        # Share the images if all of them fit into memory.
        data, object_store_bytes = prepared.data, cluster_hardware().object_store_bytes
        self.feed: DataFeed | None = None
        if keeps_shared(config, data, object_store_bytes):
            in_memory = dataclasses.replace(config, cache="memory")
            self.feed = DataFeed(in_memory, data, 0, object_store_bytes)

        # Start the coordinator, to which unreadable images are reported, and read.
        self._needs_coordinator = partial(needs_coordinator, prepared, coordinated="its trials", command="sweep")
        with self._needs_coordinator(), ExitStack() as opened:
            self.coordinator, credentials, self._lender = open_coordinator(
                prepared,
                opened,
                num_workers=placement.num_workers,
                num_steps=num_steps,
                steps_per_epoch=num_steps,
                skip_limit=prepared.skip_limit(),
            )
            self._monitor = RayMonitor(self.coordinator, self._needs_coordinator)
            if self.feed is not None:
                opened.callback(self.feed.close)
                self.feed.connect(self.coordinator, credentials, placement)
                self.feed.start()
                self.feed.fill_cache()  # runs start at different times, so do not wait for workers to start
            self._opened = opened.pop_all()

    def __exit__(self, *exception: object) -> None:
        if raylet_answers():
            self._opened.close()

    def poll(self) -> tuple[Snapshot, str | None]:
        """Return a snapshot, and why the runs must end, or None if they may continue.

        The snapshot has the number of images that cannot be used, and a request to stop all runs. Call this about every
        second, because it also renews the credentials with which images are read. Raises :class:`CoordinatorLost` if
        the coordinator has died.
        """
        snapshot, ending = self._monitor.snapshot(START), self._monitor.ending()
        with self._needs_coordinator():
            self._lender.lend_if_due()
        return snapshot, ending.failure

    def skipped_images(self) -> list[SkippedImage]:
        """Return the images that no run can use; empty if the coordinator has died, which :meth:`poll` reports."""
        try:
            return ray.get(self.coordinator.skipped_images.remote())
        except LOST_ACTOR:
            return []

    def finish(self, status: EndStatus) -> None:
        """Write the list of skipped images to its end; it is in storage when this returns."""
        self._monitor.finish(status)
