"""The workers of a run on a Ray cluster, their coordinator, feed and trainer."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import ExitStack
from functools import partial
from typing import cast

import ray

from raytrain.errors import CoordinatorLost, current_folder
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.placement import place
from raytrain.launch.prepare import PreparedRun
from raytrain.launch.ray.cluster_watch import CapacityCheck, HeadWatch, LogRoomCheck, ReadersCheck
from raytrain.launch.ray.connection import Connection
from raytrain.launch.ray.coordinator import RayMonitor, needs_coordinator, open_coordinator
from raytrain.launch.ray.feed.data_feed import DataFeed, RaySharedImages
from raytrain.launch.ray.head_queries import raylet_answers
from raytrain.launch.ray.nodes import (
    check_shared,
    cluster_hardware,
    decoder_problem_on_nodes,
    fastest_on_nodes,
    fastest_resizer_on_nodes,
)
from raytrain.launch.ray.trainer import TrainerThread, check_elastic
from raytrain.launch.ray.worker import RayWorkerInputs, pickle_functions, work
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.outcome import failure_sentence
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training.assembly import load_initial_weights
from raytrain.training.run_spec import RunSpec

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a loop or a model may read files by relative paths
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # what a loop prints would be in both logs of its worker
os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # the dashboard of a cluster lists the run


class RayLaunch:
    """A :class:`~raytrain.launch.session.Launch` that starts, watches and ends a run's processes on a cluster.

    The constructor decides on the workers and on the options that were left open, and starts no worker yet. It raises
    UsageError if the cluster has too few CPUs or GPUs, or too little memory, if not all nodes share the storage, or if
    the weights do not fit.
    """

    ends_workers = True

    def __init__(self, prepared: PreparedRun, cluster: Connection) -> None:
        # Where the workers go, which decides what was left open in the options.
        hardware = cluster_hardware()
        group = prepared.group
        self._placement = group.placement if group else place(prepared.config, hardware)
        check_elastic(self._placement)
        check_shared(prepared.store, prepared.config.storage, hardware.num_nodes)
        self.num_workers, device = self._placement.num_workers, self._placement.device
        self._one_node = hardware.num_nodes == 1
        if self._one_node:
            self.config = prepared.resolve(self.num_workers, device)
        else:
            self.config = prepared.resolve(
                self.num_workers, device, fastest_on_nodes, fastest_resizer_on_nodes, decoder_problem_on_nodes
            )
        self._prepared = prepared
        self._needs_coordinator = partial(needs_coordinator, prepared)
        self._cluster = cluster

        # What travels to the workers.
        spec = RunSpec.of(self.config, prepared.data, prepared.store, prepared.loop, self.num_workers)
        self._spec = spec.with_functions()
        self._functions = pickle_functions(self._spec, with_imports=cluster.own is None)
        self._shared: RaySharedImages | None = group and group.images  # of the runs of a sweep, if it has any
        shared_feed = self._shared and self._shared.feed
        self._owns_feed = shared_feed is None
        self._feed = shared_feed or DataFeed(
            self.config, prepared.data, prepared.first_step, hardware.object_store_bytes
        )
        weights = load_initial_weights(self._spec, prepared.first_step)
        self._weights = None if weights is None else ray.put(weights)
        self._is_finished = False

    def start(self) -> Coordinator:
        """Start the coordinator, the workers and the reading of the data; return the coordinator for the session.

        Raises :class:`CoordinatorLost` if the coordinator has died, and UsageError if a run of this name and storage
        trains in the cluster already, or if some node does not have the images.
        """
        prepared = self._prepared
        with self._needs_coordinator(), ExitStack() as opened:
            self._capacity = CapacityCheck(self._placement)
            opened.callback(self._capacity.close)
            coordinator, credentials, self._lender = open_coordinator(
                prepared, opened, num_workers=self.num_workers, **prepared.monitor_arguments(self._spec.plan)
            )
            coordinator.note_checked.remote(False)  # by this process, so that the workers need not tell
            if self._owns_feed:
                opened.callback(self._feed.close)  # the feeders, if the start fails before the feed does
                self._feed.connect(coordinator, credentials, self._placement)

            # The workers start from here on, each with the same two records.
            folder = opened.enter_context(TemporaryFolder())  # Ray Train's own notes; the run's are in its storage
            spec = dataclasses.replace(
                self._spec, loop=None, transforms=None, store=prepared.store.with_lent_credentials(credentials)
            )
            inputs = RayWorkerInputs(
                images=self._feed.images,
                orders=self._feed.orders,
                weights=self._weights,
                functions=self._functions,
                module_path=tuple(sys.path),
                threads=self._placement.threads,
                arguments=prepared.arguments,
                node=ray.get_runtime_context().get_node_id(),
                working_folder=current_folder(),
                variables=frozenset(os.environ),
                feeders=self._feed.feeders,
                coordinator=coordinator,
            )
            self._trainer = TrainerThread(
                lambda: work(spec, inputs),
                coordinator,
                self._placement,
                str(folder),
                name=prepared.name,
                in_dashboard=self._cluster.own is None,  # one that this process has started has no dashboard
                max_failures=self.config.max_failures,
                one_node=self._one_node,
            )
            opened.callback(self._end_trainer)

            # Meanwhile, images are read.
            if self._owns_feed:
                opened.callback(self._feed.close)  # before the workers end
                self._feed.start()
            self._monitor = RayMonitor(coordinator, self._needs_coordinator)
            self._head = HeadWatch(self._monitor.note_event)
            opened.callback(self._head.close)
            self._readers = ReadersCheck(self._feed.task_cpus, self._monitor.note_event)
            opened.callback(self._readers.close)
            self._log_room = self._cluster.own and LogRoomCheck(self._cluster.own.log_folder)
            self._opened = opened.pop_all()
        return cast(Coordinator, self._monitor)  # it has all methods of one that a session calls

    def poll(self, snapshot: Snapshot) -> None:
        """Renew credentials, and look for workers and data tasks without room, and for a head that does not answer.

        Raises what :meth:`CapacityCheck.check` and :meth:`LogRoomCheck.check` raise. Raises :class:`CoordinatorLost` if
        the coordinator has died, or the head of this process's own Ray, which nobody starts again: a minute later, Ray
        would end this process.
        """
        if snapshot.status == "running":
            self._feed.fill_cache()
            self._readers.check(snapshot.step)
        is_starting, is_stopping = snapshot.status == "starting", snapshot.stop_request is not None
        self._capacity.check(is_starting=is_starting, is_stopping=is_stopping)
        if self._log_room is not None:
            self._log_room.check(snapshot.step)
        with self._needs_coordinator():
            self._lender.lend_if_due()
        self._head.poll()
        own_ray, prepared = self._cluster.own, self._prepared
        if own_ray is not None and not self._head.answers and own_ray.has_lost_head():
            reason = "Ray's head on this machine, the gcs_server, has died"
            sentence = failure_sentence(prepared.config, reason, prepared.loop, command=prepared.command)
            raise CoordinatorLost(sentence, prepared.name, prepared.store.url)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the workers to report the end; return whether Ray Train has ended.

        Raises :class:`CoordinatorLost` if the coordinator has died.
        """
        self._monitor.wait_for_end(timeout_s)
        return self._trainer.ended.done()

    def failure(self) -> str | None:
        """Return why Ray Train gave up; None if it has not ended, or ended normally."""
        return self._trainer.ended.result() if self._trainer.ended.done() else None

    def end_workers(self) -> None:
        """If runs share the images, have this run's monitor note those that could not be used.

        No worker is ended here: they end by themselves, or in :meth:`close`.
        """
        if self._shared is not None:
            self._monitor.note_skipped(self._shared.skipped_images())

    def close(self, *, finished: bool) -> None:
        """Leave nothing of the run in the cluster; unless it is ``finished``, its workers may still train.

        If this machine's raylet has died, everything here has ended with it, and a call of Ray could end this process.
        """
        self._is_finished = finished
        if raylet_answers():
            self._opened.close()

    def _end_trainer(self) -> None:
        """End the workers and the coordinator.

        If workers still train, and the cluster is this process's own, they end with the whole cluster after this use,
        unless another thread uses it.
        """
        own_ray = self._cluster.own
        still_trains = not (self._is_finished or self._trainer.ended.done())
        self._trainer.end(cluster_ends=still_trains and own_ray is not None and own_ray.end_after_use())
