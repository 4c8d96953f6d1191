"""The coordinator of a run: an actor beside the driver that everybody in the cluster talks to.

It is composed of five parts, of which only the last knows Ray, and adds nothing but their remote methods:

- the run monitor: metrics, events, skipped images and stop requests (workers, data tasks, driver, ``raytrain stop``);
- the stream queues: blocks from the driver, which reads them, to the workers;
- the block directory: where the blocks of cached data sets are;
- the credential broker: the driver's credentials for processes that have none of their own;
- the object stores: how full they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorProxy

from raytrain.backends.prepare import PreparedRun
from raytrain.backends.ray.block_directory import BlockDirectory
from raytrain.backends.ray.object_stores import ObjectStores
from raytrain.backends.ray.private_api import on_this_node
from raytrain.backends.ray.stream_queues import Stream, StreamQueues
from raytrain.errors import UsageError
from raytrain.monitor.events import Event
from raytrain.runs.documents import run_store
from raytrain.runs.history import History
from raytrain.runs.machine_use import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import Outcome, StopReason, TrainResult
from raytrain.runs.owned_store import OwnedStore, Owner
from raytrain.runs.skipped_images import SkipLimit, SkippedImage
from raytrain.runs.snapshot import RowCursor, Snapshot, Status
from raytrain.storage.clouds.cloud import Cloud
from raytrain.storage.credentials import CredentialFields
from raytrain.storage.lent_credentials import CredentialBroker
from raytrain.storage.open import open_store

WAIT, FEED, KEYS = "wait", "feed", "keys"
"""Concurrency groups of the calls that run beside the others: those of workers that wait, those of the driver's threads
that fill queues, and those for credentials, without which what the workers wait for cannot be read."""
_NAMESPACE = "raytrain"
_WAITS_PER_WORKER = 2  # for training images, and meanwhile for test images
_OTHER_WAITS = 8  # for a stop request, and until the history is written
_ASKERS = 8
_FEEDERS = 4  # one listens, one feeds each data set; a stream that was given up may still hold one


@dataclass(frozen=True, kw_only=True)
class RunInStorage:
    """What a coordinator is made from. Holds no secret: the cluster keeps the arguments of an actor's constructor."""

    name: str
    url: str
    cloud: Cloud | None
    num_steps: int
    steps_per_epoch: int
    skip_limit: SkipLimit
    owner: Owner | None  # of the run, as whom the coordinator writes to storage
    started_at: float | None = None  # when the user started it, as ``time.monotonic()`` says on the driver's node

    @classmethod
    def of(
        cls, prepared: PreparedRun, num_steps: int, steps_per_epoch: int, started_at: float | None = None
    ) -> RunInStorage:
        """The place in storage of ``prepared``, which takes ``num_steps`` steps in all."""
        return cls(
            name=prepared.name,
            url=prepared.store.url,
            cloud=prepared.store.cloud,
            num_steps=num_steps,
            steps_per_epoch=steps_per_epoch,
            skip_limit=prepared.skip_limit(),
            owner=prepared.claim and prepared.claim.owner,
            started_at=None if prepared.restarting else started_at,  # the time until then is in the history
        )


class Coordinator:
    """Carries calls of other processes to its parts, in the order in which each process makes them.

    Calls that wait run beside the others, in concurrency groups.
    """

    def __init__(self, run: RunInStorage) -> None:
        self._broker = CredentialBroker()
        self._queues = StreamQueues()
        self._directory = BlockDirectory()
        self._stores = ObjectStores()
        store = open_store(run.url, cloud=run.cloud).with_lent_credentials(self._broker.source)
        if run.owner is not None:
            store = OwnedStore(run.url, run.cloud, store, run.owner)
        self._monitor = RunMonitor(
            run.name,
            run.num_steps,
            run.steps_per_epoch,
            History(store),
            skip_limit=run.skip_limit,
            started_at=run.started_at,
        )
        self._outcome: Outcome | None = None
        self._controller: list[Any] = []

    # Credentials.

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """See :meth:`CredentialBroker.lend`."""
        self._broker.lend(ticket, cloud, fields)

    @ray.method(concurrency_group=KEYS)
    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """See :meth:`CredentialBroker.credentials`."""
        return self._broker.credentials(ticket, cloud)

    # News of the training.

    def started(self, num_workers: int, step: int) -> None:
        """See :meth:`RunMonitor.started`."""
        self._monitor.started(num_workers, step)

    def record(self, row: MetricRow) -> None:
        """See :meth:`RunMonitor.record`."""
        self._monitor.record(row)

    def measured(self, use: MachineUse, node_id: str) -> None:
        """See :meth:`RunMonitor.measured`; adds how full the object store of the node is."""
        self._monitor.measured(self._stores.add_to(use, node_id))

    def event(self, event: Event) -> None:
        """See :meth:`RunMonitor.event`."""
        self._monitor.event(event)

    def skip(self, images: Sequence[SkippedImage]) -> None:
        """See :meth:`RunMonitor.skip`."""
        self._monitor.skip(images)

    def skipped_images(self) -> list[SkippedImage]:
        """See :attr:`RunMonitor.skipped_images`."""
        return self._monitor.skipped_images

    def retried(self, num_requests: int) -> None:
        """See :meth:`RunMonitor.retried`."""
        self._monitor.retried(num_requests)

    def received(self) -> None:
        """Return once the earlier calls of the same process have returned."""

    @ray.method(concurrency_group=WAIT)
    def flush(self) -> None:
        """See :meth:`RunMonitor.flush`; beside the other calls, because storage may be slow."""
        self._monitor.flush()

    # Stop requests.

    def request_stop(self, request: StopReason) -> None:
        """See :meth:`RunMonitor.request_stop`."""
        self._monitor.request_stop(request)

    @ray.method(concurrency_group=WAIT)
    def wait_for_stop_request(self, timeout_s: float) -> StopReason | None:
        """See :meth:`RunMonitor.wait_for_stop_request`."""
        return self._monitor.wait_for_stop_request(timeout_s)

    # The driver's view, and the end.

    def snapshot(self, since: RowCursor) -> Snapshot:
        """See :meth:`RunMonitor.snapshot`."""
        return self._monitor.snapshot(since)

    def failure(self) -> str | None:
        """See :attr:`RunMonitor.failure`."""
        return self._monitor.failure

    def conclude(self, outcome: Outcome) -> None:
        """Keep what the workers say of how the run ended, until the driver asks for it."""
        self._outcome = outcome

    def outcome(self) -> Outcome | None:
        """What :meth:`conclude` was given; None as long as the workers have said nothing."""
        return self._outcome

    def finish(self, status: Status, result: TrainResult | None) -> None:
        """See :meth:`RunMonitor.finish`."""
        self._monitor.finish(status, result)

    def set_controller(self, controller: list[Any]) -> None:
        """Keep Ray Train's controller of this run: a list with the reference of its handle."""
        self._controller = controller

    def controller(self) -> list[Any]:
        """What :meth:`set_controller` was given; empty until the controller has started."""
        return self._controller

    # Cached blocks.

    def add_blocks(self, dataset: str, refs: list[Any]) -> None:
        """See :meth:`BlockDirectory.add`."""
        self._directory.add(dataset, refs)

    def fail_blocks(self, reason: str) -> None:
        """See :meth:`BlockDirectory.fail`."""
        self._directory.fail(reason)

    @ray.method(concurrency_group=WAIT)
    def blocks(self, dataset: str, first: int, timeout_s: float) -> list[Any]:
        """See :meth:`BlockDirectory.blocks`."""
        return self._directory.blocks(dataset, first, timeout_s)

    # Streamed blocks.

    def join_group(self) -> int:
        """See :meth:`StreamQueues.join_group`."""
        return self._queues.join_group()

    def open_stream(self, stream: Stream) -> None:
        """See :meth:`StreamQueues.open`."""
        self._queues.open(stream)

    @ray.method(concurrency_group=FEED)
    def requested_stream(self, timeout_s: float) -> Stream | None:
        """See :meth:`StreamQueues.requested`."""
        return self._queues.requested(timeout_s)

    @ray.method(concurrency_group=FEED)
    def push(self, stream: Stream, rank: int, block: list[Any], depth: int) -> bool:
        """See :meth:`StreamQueues.push`."""
        return self._queues.push(stream, rank, block, depth)

    @ray.method(concurrency_group=WAIT)
    def take(self, stream: Stream, rank: int, timeout_s: float) -> list[Any]:
        """See :meth:`StreamQueues.take`."""
        return self._queues.take(stream, rank, timeout_s)

    def fail_stream(self, stream: Stream, reason: str) -> None:
        """See :meth:`StreamQueues.fail`."""
        self._queues.fail(stream, reason)

    def close_streams(self) -> None:
        """See :meth:`StreamQueues.close`."""
        self._queues.close()


CoordinatorHandle = ActorProxy[Coordinator]


def start_coordinator(run: RunInStorage, num_workers: int, kind: type[Coordinator] = Coordinator) -> CoordinatorHandle:
    """The coordinator of a run, on the driver's node. It is found by the run's URL from anywhere in the cluster.

    All of up to ``num_workers`` workers may wait at once, each in a thread of the coordinator.

    Raises UsageError if the run has a coordinator in this cluster already.
    """
    groups = {WAIT: _WAITS_PER_WORKER * num_workers + _OTHER_WAITS, FEED: _FEEDERS, KEYS: _ASKERS}
    actor = ray.remote(concurrency_groups=groups)(kind)  # pyright: ignore
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": on_this_node()}
    try:
        return actor.options(name=_actor_name(run.name, run.url), namespace=_NAMESPACE, **options).remote(run)
    except ValueError:  # Ray has no other error for a name that is taken
        raise UsageError(
            f"Run {run.name!r} is training in this cluster already; stop it first, or choose another --name."
        ) from None


def stop_coordinator(coordinator: CoordinatorHandle) -> None:
    """End the coordinator's process."""
    ray.kill(coordinator)  # pyright: ignore[reportArgumentType] ; Ray types a handle as handle or class


def request_stop_in_cluster(name: str, storage: str, address: str, request: StopReason) -> None:
    """Ask a run that trains in the connected cluster to stop; raises UsageError if there is none of this name."""
    try:
        actor_name = _actor_name(name, run_store(storage, name).url)
        coordinator: CoordinatorHandle = ray.get_actor(actor_name, namespace=_NAMESPACE)
    except ValueError:
        raise UsageError(
            f"No run called {name!r} is training in the cluster at {address} with --storage {storage}; give the "
            "--storage that it was started with, whose runs `raytrain runs` lists."
        ) from None
    ray.get(coordinator.request_stop.remote(request))


def _actor_name(run: str, url: str) -> str:
    """Others may have runs of the same name in this cluster, in storage of their own."""
    return f"run:{run}:{hashlib.sha256(url.encode()).hexdigest()[:16]}"
