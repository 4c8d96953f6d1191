"""The run's coordinator as a Ray actor beside the driver, and the driver's credentials, from memory to memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorProxy
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

from raytrain.errors import CoordinatorLost, UsageError
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.ray.feed.exchange import BlockDirectory
from raytrain.launch.ray.nodes import ObjectStores
from raytrain.launch.ray.private_api import delay_barrier, on_this_node
from raytrain.monitor.events import Event
from raytrain.runs.documents import run_store
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.outcome import StopReason, failure_sentence
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.credentials import BucketCredentials, CredentialFields, CredentialSource, restored
from raytrain.storage.lent_credentials import CredentialBroker, CredentialLender, Scope, ScopedCredentials
from raytrain.storage.store import Store

if TYPE_CHECKING:
    from raytrain.launch.prepare import PreparedRun

WAIT, KEYS = "wait", "keys"
"""Concurrency groups of the calls that run beside the others: those of workers that wait, and those for credentials,
without which what the workers wait for cannot be read."""
_NAMESPACE = "raytrain"
_WAITS_PER_WORKER = 2  # for training images, and meanwhile for test images
_OTHER_WAITS = 8  # for a stop request, and until the history is written
_ASKERS = 8
_TRAINS_WITHIN_S = 15.0
WATCHER, PRINT_PATCH = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_ENABLE_PRINT_PATCH"


class RayCoordinator(Coordinator):
    """A coordinator in a process of its own, with what the feed of images needs, and the driver's credentials.

    Its calls that wait run beside the others, in concurrency groups. The cluster keeps the arguments of its
    constructor, which hold no secret: ``store`` uses the credentials that are lent later.
    """

    def __init__(self, name: str, store: Store, **known: Any) -> None:
        self._broker = CredentialBroker()
        self._directory = BlockDirectory()
        self._stores = ObjectStores()
        self._controller: Any = None
        self._controlled: Future[None] = Future()  # the controller has ended
        self._trains = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._reserved: PlacementGroup | None = None
        self._num_groups = 0
        super().__init__(name, store.with_lent_credentials(self._broker.source), **known)

    # Credentials.

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        self._broker.lend(ticket, cloud, fields)

    @ray.method(concurrency_group=KEYS)
    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        return self._broker.credentials(ticket, cloud)

    # News of the training, beside that of the base class.

    def measured_on(self, use: MachineUse, node_id: str) -> None:
        """Note how a worker's machine is used, and how full the object store of its node is."""
        self.measured(self._stores.add_to(use, node_id))

    def received(self) -> None:
        """Return once the earlier calls of the same process have returned."""

    @ray.method(concurrency_group=WAIT)
    def flush(self) -> None:
        super().flush()

    @ray.method(concurrency_group=WAIT)
    def wait_for_stop_request(self, timeout_s: float) -> StopReason | None:
        return super().wait_for_stop_request(timeout_s)

    # Ray Train.

    @ray.method(concurrency_group=WAIT)
    def control(self, kind: type, arguments: dict[str, Any], environment: dict[str, str]) -> Any:
        """Be Ray Train's controller, which would otherwise have a process of its own: start the workers, watch them."""
        # Workers would get these in a runtime environment, which takes each a third of a second: only the controller
        # reads the first, and workers inherit the second, as this process does, from a Ray that raytrain has started.
        needless = [WATCHER] + [PRINT_PATCH] * (os.environ.get(PRINT_PATCH) == environment.get(PRINT_PATCH))
        os.environ.update(environment)
        this: CoordinatorHandle = ray.get_runtime_context().current_actor
        delay_barrier(this.after_start.remote)
        self._controller = _interruptible(kind)(**arguments)
        for name in needless:
            os.environ.pop(name, None)
        try:
            self._loop.run_until_complete(self._controller.run())
        finally:
            self._controlled.set_result(None)
        return self._controller.get_result()

    @ray.method(concurrency_group=WAIT)
    def after_start(self, value: Any) -> Any:
        """Return ``value`` when the workers train, or after a while: a loop may wait for what waits for this."""
        self._trains.wait(_TRAINS_WITHIN_S)
        return value

    def started(self, num_workers: int, step: int) -> None:
        super().started(num_workers, step)
        self._trains.set()

    @ray.method(concurrency_group=WAIT)
    def abort(self) -> None:
        """End the workers if they have not ended, free their CPUs and GPUs, and end this process."""
        if self._loop.is_running():
            answer = asyncio.run_coroutine_threadsafe(_abort(self._controller), self._loop)
            wait([answer, self._controlled], return_when=FIRST_COMPLETED)  # the loop may end before it comes to this

    # Cached blocks.

    def add_blocks(self, dataset: str, refs: list[Any]) -> None:
        self._directory.add(dataset, refs)

    def fail_blocks(self, reason: str) -> None:
        self._directory.fail(reason)

    @ray.method(concurrency_group=WAIT)
    def blocks(self, dataset: str, first: int, timeout_s: float) -> list[Any]:
        return self._directory.blocks(dataset, first, timeout_s)

    # Worker groups.

    def join_group(self, reserved: PlacementGroup | None) -> int:
        """The number of a worker group, counted from 0, which has ``reserved`` its CPUs and GPUs."""
        self._reserved = reserved
        self._num_groups += 1
        return self._num_groups - 1

    def reserved(self) -> PlacementGroup | None:
        """What the last worker group has reserved."""
        return self._reserved


def _interruptible(kind: type) -> type:
    """The class of a controller that lets an abort come in between its tries to start workers, however many."""

    class Controller(kind):
        async def _run_control_loop_iteration(self) -> None:
            await super()._run_control_loop_iteration()
            await asyncio.sleep(0)

    return Controller


async def _abort(controller: Any) -> None:  # no method: Ray would run all methods of the class in a loop
    with suppress(SystemExit):  # the loop must go on until the caller has its answer
        await controller.abort()


CoordinatorHandle = ActorProxy[RayCoordinator]


def start_coordinator(name: str, store: Store, *, num_workers: int, **known: Any) -> CoordinatorHandle:
    """The coordinator of a run, on the driver's node, found by the run's URL; UsageError if the run has one already."""
    groups = {WAIT: _WAITS_PER_WORKER * num_workers + _OTHER_WAITS, KEYS: _ASKERS}
    actor = ray.remote(concurrency_groups=groups)(RayCoordinator)  # pyright: ignore
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": on_this_node()}
    named = actor.options(name=_actor_name(name, store.url), namespace=_NAMESPACE, **options)
    try:
        return named.remote(name, store, **known)
    except ValueError:  # Ray has no other error for a name that is taken
        raise UsageError(
            f"Run {name!r} is training in this cluster already; stop it first, or choose another --name."
        ) from None


def open_coordinator(
    prepared: PreparedRun, opened: ExitStack, **known: Any
) -> tuple[CoordinatorHandle, ServedCredentials, CredentialLender]:
    """The coordinator of a run, until ``opened`` is closed, and what :func:`lend_credentials` returns for it."""
    data, store = prepared.data, prepared.store
    coordinator = start_coordinator(prepared.name, store, skip_limit=prepared.skip_limit(), **known)
    opened.callback(stop_coordinator, coordinator)
    stores = store, data.train_store, data.test_store
    return coordinator, *lend_credentials(coordinator, stores, prepared.scope())


def stop_coordinator(coordinator: CoordinatorHandle) -> None:
    """End the coordinator's process."""
    ray.kill(coordinator)  # pyright: ignore[reportArgumentType] ; Ray types a handle as handle or class


class RayMonitor:
    """Asks the coordinator of a run, or ``of`` a sweep's trials, from another process; has all of its methods."""

    def __init__(
        self, coordinator: CoordinatorHandle, prepared: PreparedRun, of: str = "it", command: str = "train"
    ) -> None:
        self._coordinator = coordinator
        self._prepared = prepared
        self._of, self._command = of, command

    def __getattr__(self, name: str) -> Any:
        """The coordinator's method of this name."""
        return partial(self._ask, name)

    def event(self, event: Event) -> None:
        """Note something that a viewer should read, without waiting."""
        self._coordinator.event.remote(event)

    def _ask(self, method: str, *arguments: object) -> Any:
        """Its answer; raises :class:`CoordinatorLost` if it has died."""
        try:
            return ray.get(getattr(self._coordinator, method).remote(*arguments))
        except RayActorError:
            prepared, reason = self._prepared, f"the process that coordinates {self._of} has died"
            sentence = failure_sentence(prepared.config, reason, prepared.loop, command=self._command)
            raise CoordinatorLost(sentence, prepared.name, prepared.store.url) from None


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


_SERVER_ASKERS = 64


@dataclass(frozen=True)
class ServedCredentials:
    """``LentCredentials`` that ask an actor with a method ``credentials``. Pickled with a store; they hold no key.

    Everybody in the cluster can call an actor that has a name. Only who has the ticket is given credentials.
    """

    server: Any
    ticket: str = field(repr=False)

    def __call__(self, cloud: str) -> BucketCredentials | None:
        return restored(cloud, ray.get(self.server.credentials.remote(self.ticket, cloud)))

    def _lend(self, cloud: str, fields: CredentialFields | None) -> None:
        # As an argument of a call, which the cluster keeps nowhere. Awaited, so that nobody asks before.
        ray.get(self.server.lend.remote(self.ticket, cloud, fields))


def lend_credentials(
    server: Any, stores: Iterable[Store], scope: Scope | None = None
) -> tuple[ServedCredentials, CredentialLender]:
    """This process's credentials for the ``stores`` in other processes, through an actor that serves them.

    Those of each cloud that has a store are lent now and whenever the lender is told that they may be due again. If all
    stores are folders, nothing is lent: the actor has nothing that it could give away. With a ``scope``, what is lent
    is good for that alone; raises UsageError if STS does not issue such credentials.
    """
    served = ServedCredentials(server, secrets.token_hex(16))
    first: dict[str, Store] = {}
    for store in stores:
        if store.cloud is not None:
            first.setdefault(store.cloud.name, store)
    sources = {cloud: _lent_source(store, scope) for cloud, store in first.items()}
    return served, CredentialLender(served._lend, sources)


def _lent_source(store: Store, scope: Scope | None) -> CredentialSource:
    assert store.cloud is not None
    if scope is None:
        return store.cloud.credentials
    if isinstance(store.cloud, S3):
        return ScopedCredentials(scope, store.cloud.region or "us-east-1")
    raise UsageError(f"--scope-keys limits keys with AWS STS, and {store.url} is not in S3; leave the option out.")


@contextmanager
def serving_credentials(
    stores: Iterable[Store], scope: Scope | None = None
) -> Iterator[tuple[ServedCredentials, CredentialLender]]:
    """Serve credentials as :func:`lend_credentials` does, with an actor that lives as long as the ``with`` block."""
    server: Any = (
        ray.remote(CredentialBroker)  # keys are lent later: the cluster keeps the arguments of constructors
        .options(num_cpus=0, max_concurrency=_SERVER_ASKERS, label_selector=on_this_node())
        .remote()
    )
    try:
        yield lend_credentials(server, stores, scope)
    finally:
        ray.kill(server)
