"""Images that several runs of this process share: decoded once, in Ray's object store, and known to a coordinator."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import ray
from ray.exceptions import RayActorError

from raytrain.config import ResolvedConfig
from raytrain.errors import CoordinatorLost
from raytrain.launch.cache_choice import keeps_shared
from raytrain.launch.coordinator import Ending
from raytrain.launch.placement import Placement
from raytrain.launch.prepare import PreparedRun
from raytrain.launch.ray.coordinator import start_coordinator, stop_coordinator
from raytrain.launch.ray.credential_server import lend_credentials
from raytrain.launch.ray.feed.data_feed import DataFeed
from raytrain.launch.ray.hardware import cluster_hardware
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.runs.metric_row import SkippedImage
from raytrain.runs.outcome import EndStatus, failure_sentence


class SharedImages:
    """Images that several runs of this process keep decoded, once for all, while it is open; ``feed`` is None if they
    do not fit.

    ``prepared`` is what the runs belong to, whose documents list the images that cannot be used; ``config`` are the
    options of one of them, and ``placement`` lays out those that train at once.
    """

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, placement: Placement, num_steps: int) -> None:
        self._prepared = prepared
        data, room = prepared.data, cluster_hardware().object_store_bytes
        self.feed: DataFeed | None = None
        if keeps_shared(config, data, room):
            in_memory = dataclasses.replace(config, cache="memory")
            self.feed = DataFeed(in_memory, data, data.plan(config), data.test_plan(1), 0, room)
        with ExitStack() as opened:
            self.coordinator = start_coordinator(
                prepared.name,
                prepared.store,
                num_steps=num_steps,
                steps_per_epoch=num_steps,
                num_workers=placement.num_workers,
                skip_limit=prepared.skip_limit(),
            )
            opened.callback(stop_coordinator, self.coordinator)
            stores = prepared.store, data.train_store, data.test_store
            scope = prepared.scope(f"{prepared.store.url}/")
            credentials, self._lender = lend_credentials(self.coordinator, stores, scope)
            if self.feed is not None:
                self.feed.connect(self.coordinator, credentials)
                self.feed.start(placement)
                opened.callback(self.feed.close)
                self.feed.workers_started()  # runs start at different times, so all images are read at once
            self._opened = opened.pop_all()

    def __enter__(self) -> SharedImages:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def look(self) -> tuple[Snapshot, str | None]:
        """How many images cannot be used, with a request to stop all runs; and why they have to end, if that is so.

        To be called every second or so, as this also renews the credentials with which images are read. Raises
        :class:`CoordinatorLost` if the coordinator has died.
        """
        try:
            snapshot: Snapshot = ray.get(self.coordinator.snapshot.remote(START))
            ending: Ending = ray.get(self.coordinator.ending.remote())
            if self._lender is not None:
                self._lender.lend_if_due()
        except RayActorError:
            raise self._lost() from None
        return snapshot, ending.failure

    def skipped_images(self) -> list[SkippedImage]:
        """The images that no run can use."""
        return ray.get(self.coordinator.list_skipped.remote())

    def finish(self, status: EndStatus) -> None:
        """End the list of skipped images: it is in storage when this returns."""
        ray.get(self.coordinator.finish.remote(status, None))

    def _lost(self) -> CoordinatorLost:
        name, storage = self._prepared.name, self._prepared.config.storage
        sentence = failure_sentence(name, storage, "the process that coordinates its trials has died")
        return CoordinatorLost(sentence, name, self._prepared.store.url)
