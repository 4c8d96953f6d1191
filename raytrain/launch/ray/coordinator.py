"""The run's coordinator as a Ray actor beside the driver.

One actor does for a run all that needs a process beside the driver's, for each process takes seconds to start: it
monitors the run, it is Ray Train's controller, it knows where cached blocks are, and it gives out credentials.

An actor answers one call at a time unless its methods are in concurrency groups, which have threads of their own. Here,
every method that may wait is in the group ``WAIT``. It has a thread for each call that may wait at the same time, so
that the reports of workers are received meanwhile. ``credentials`` is in a group of its own, ``KEYS``: what the calls
in ``WAIT`` wait for may have to be read with these credentials first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorProxy
from ray.exceptions import OutOfMemoryError

from raytrain.errors import CoordinatorLost, RaytrainError, TrainingFailed, UsageError
from raytrain.launch.coordinator import Coordinator, Ending
from raytrain.launch.ray.connection import is_connected
from raytrain.launch.ray.head_queries import raylet_answers
from raytrain.launch.ray.nodes import ObjectStores
from raytrain.launch.ray.private_api import delay_barrier, name_placement_groups, on_this_node
from raytrain.launch.ray.ray_errors import LOST_ACTOR
from raytrain.launch.ray.serve_credentials import NAMESPACE, ServedCredentials, lend_credentials
from raytrain.monitor.events import Event
from raytrain.monitor.snapshot import START, RowCursor, Snapshot, Status
from raytrain.runs.documents import run_store
from raytrain.runs.logs import PrintedLine
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import SkippedImage
from raytrain.runs.outcome import StopReason, TrainResult, failure_sentence
from raytrain.storage.credentials import CredentialFields
from raytrain.storage.lent_credentials import CredentialBroker, CredentialLender
from raytrain.storage.scoped_keys import Scope
from raytrain.storage.store import Store
from raytrain.training.script_logging import LoggedRecord

if TYPE_CHECKING:
    from raytrain.launch.prepare import PreparedRun

WAIT, KEYS = "wait", "keys"
"""Concurrency groups: calls that wait, and those for credentials."""
WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
PRINT_PATCH = "RAY_TRAIN_ENABLE_PRINT_PATCH"
_WAITS_PER_WORKER = 2  # for training images, and meanwhile for validation images
_OTHER_WAITS = 8  # for a stop request, for the end, and until the history is written
_KEYS_AT_A_TIME = 8
_TRAINS_WITHIN_S = 15.0


class RayCoordinator(Coordinator):
    """A coordinator in a process of its own, with the references of cached blocks, and the driver's credentials.

    The cluster keeps the arguments of its constructor, which hold no secret: ``store`` uses the credentials that are
    lent later. ``monitor_arguments`` are the other arguments of :class:`~raytrain.monitor.monitor.RunMonitor`.
    """

    def __init__(self, name: str, store: Store, **monitor_arguments: Any) -> None:
        self._broker = CredentialBroker()
        self._blocks_changed = threading.Condition()
        self._blocks: dict[str, list[Any]] = defaultdict(list)
        self._blocks_failure: str | None = None
        self._object_stores = ObjectStores()
        self._controller: Any = None
        self._controller_ended: Future[None] = Future()
        self._workers_train = threading.Event()
        self._event_loop = asyncio.new_event_loop()  # of the controller
        self._num_attempts = 0
        super().__init__(name, store.with_lent_credentials(self._broker.source), **monitor_arguments)

    # Ray Train.

    @ray.method(concurrency_group=WAIT)
    def control(self, kind: type, arguments: dict[str, Any], environment: dict[str, str], prefix: str) -> Any:
        """Run Ray Train's controller, which starts and watches the workers, until they have ended; return its result.

        Ray Train itself would start a process for it. ``kind`` is the class of the controller, and ``arguments`` are
        those of its constructor. The variables ``environment`` are set in this process. The names of the placement
        groups of the workers begin with ``prefix``.
        """

        class Controller(kind):
            async def _run_control_loop_iteration(self) -> None:
                await super()._run_control_loop_iteration()
                # Let the event loop run a waiting abort, also if Ray Train tries to start workers again and again.
                await asyncio.sleep(0)

        # Ray Train gives its workers the variables of its own that this process has, by a runtime environment, which
        # takes each worker a third of a second. So those that workers do not need are removed before any of them
        # starts: only the controller reads WATCHER, and from a Ray that raytrain has started, workers inherit the same
        # PRINT_PATCH as this process did.
        not_for_workers = [WATCHER]
        if os.environ.get(PRINT_PATCH) == environment.get(PRINT_PATCH):
            not_for_workers.append(PRINT_PATCH)
        os.environ.update(environment)
        own_handle: CoordinatorHandle = ray.get_runtime_context().current_actor
        delay_barrier(own_handle.after_start.remote)
        name_placement_groups(prefix)
        self._controller = Controller(**arguments)
        for name in not_for_workers:
            os.environ.pop(name, None)
        try:
            self._event_loop.run_until_complete(self._controller.run())
        finally:
            self._controller_ended.set_result(None)
        return self._controller.get_result()

    @ray.method(concurrency_group=WAIT)
    def after_start(self, value: Any) -> Any:
        """Return ``value`` when the workers train, or after 15 seconds.

        :func:`~raytrain.launch.ray.private_api.delay_barrier` has the actor of Ray Train's barrier wait for this, so
        that its process starts after the workers. There is a limit because a loop may call the barrier before its first
        step.
        """
        self._workers_train.wait(_TRAINS_WITHIN_S)
        return value

    @ray.method(concurrency_group=WAIT)
    def abort(self) -> None:
        """End the workers if they have not ended, free their CPUs and GPUs, and end this process.

        If no controller runs, because the workers have ended or were never started, this does nothing.
        """

        # This is no method, because Ray would run all methods of an actor with an async one in a single event loop.
        async def abort_controller() -> None:
            # The controller ends this process by a SystemExit. Here, it would end the event loop before the caller has
            # its answer.
            with suppress(SystemExit):
                await self._controller.abort()

        if self._event_loop.is_running():
            aborted = asyncio.run_coroutine_threadsafe(abort_controller(), self._event_loop)
            # The controller may end by itself, and its event loop with it, before that has run there.
            wait([aborted, self._controller_ended], return_when=FIRST_COMPLETED)

    # The workers: their attempts and their metrics, beside what the base class does with them.

    def begin_attempt(self) -> int:
        """Note that an attempt begins; return its number, counted from 0."""
        self.note_checked()
        self._num_attempts += 1
        return self._num_attempts - 1

    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None:
        super().note_start(num_workers, step, measures_again)
        self._workers_train.set()

    def measured_on(self, use: MachineUse, node_id: str) -> None:
        """Note how a worker's machine is used, and how full the object store of its node, ``node_id``, is."""
        self.note_machine_use(self._object_stores.add_to(use, node_id))

    def received(self) -> None:
        """Do nothing: an answer tells the caller that its earlier calls, but for those in ``WAIT``, have returned."""

    @ray.method(concurrency_group=WAIT)
    def flush(self) -> None:
        super().flush()

    @ray.method(concurrency_group=WAIT)
    def give_up(self, error: RaytrainError, trace: str = "", rank: int = 0) -> bool:
        return super().give_up(error, trace, rank)

    @ray.method(concurrency_group=WAIT)
    def wait_for_end(self, timeout_s: float) -> None:
        super().wait_for_end(timeout_s)

    @ray.method(concurrency_group=WAIT)
    def wait_for_stop_request(self, timeout_s: float) -> StopReason | None:
        return super().wait_for_stop_request(timeout_s)

    # Cached blocks. The driver reads them and keeps them; here, workers learn of their references.

    def add_blocks(self, dataset: str, refs: list[Any]) -> None:
        """Add references of the next blocks of a cached data set, in order."""
        with self._blocks_changed:
            self._blocks[dataset] += refs
            self._blocks_changed.notify_all()

    def fail_blocks(self, reason: str) -> None:
        """Have :meth:`blocks` raise RaytrainError from now on: a data set cannot be read to its end."""
        with self._blocks_changed:
            self._blocks_failure = reason
            self._blocks_changed.notify_all()

    @ray.method(concurrency_group=WAIT)
    def blocks(self, dataset: str, first: int, timeout_s: float) -> list[Any]:
        """Return references of the blocks from number ``first`` on, once there is one; [] after ``timeout_s`` seconds.

        Raises RaytrainError if a data set, this one or another, cannot be read.
        """
        with self._blocks_changed:
            self._blocks_changed.wait_for(lambda: self._blocks_failure or len(self._blocks[dataset]) > first, timeout_s)
            if self._blocks_failure:
                raise RaytrainError(self._blocks_failure)
            return self._blocks[dataset][first:]

    # Credentials.

    def lend(self, ticket: str, cloud: str, fields: CredentialFields | None) -> None:
        """Replace the lent credentials of a cloud; see :meth:`CredentialBroker.lend`."""
        self._broker.lend(ticket, cloud, fields)

    @ray.method(concurrency_group=KEYS)
    def credentials(self, ticket: str, cloud: str) -> CredentialFields | None:
        """Return the lent credentials of a cloud, if the ticket is right; see :meth:`CredentialBroker.credentials`."""
        return self._broker.credentials(ticket, cloud)


CoordinatorHandle = ActorProxy[RayCoordinator]


def open_coordinator(
    prepared: PreparedRun, opened: ExitStack, **monitor_arguments: Any
) -> tuple[CoordinatorHandle, ServedCredentials, CredentialLender]:
    """Start the coordinator of a run, which ends when ``opened`` is closed, and lend it the driver's credentials.

    Returns its handle, and what :func:`lend_credentials` returns. ``monitor_arguments`` are the other arguments of
    :func:`start_coordinator`. Raises UsageError if the run trains in this cluster already, or if STS issues no keys for
    ``--scope-keys``.
    """
    data, store = prepared.data, prepared.store
    coordinator = start_coordinator(prepared.name, store, **monitor_arguments)
    opened.callback(stop_coordinator, coordinator)
    # With --scope-keys, the keys are good for reading the images and for writing the run's folder alone.
    image_stores = [part_store for part_store, _, _ in data.parts.values()]
    scope = Scope.of(image_stores, [store]) if prepared.config.scope_keys else None
    return coordinator, *lend_credentials(coordinator, [store, *image_stores], scope)


def start_coordinator(name: str, store: Store, *, num_workers: int, **monitor_arguments: Any) -> CoordinatorHandle:
    """Start the coordinator of a run on the driver's node; its actor has a name made of the run's name and URL.

    It has threads for ``num_workers`` workers; ``monitor_arguments`` are the other arguments of its constructor. Raises
    UsageError if the run has a coordinator already.
    """
    num_threads = {WAIT: _WAITS_PER_WORKER * num_workers + _OTHER_WAITS, KEYS: _KEYS_AT_A_TIME}
    actor = ray.remote(concurrency_groups=num_threads)(RayCoordinator)  # pyright: ignore
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": on_this_node()}
    named = actor.options(name=_actor_name(name, store.url), namespace=NAMESPACE, **options)
    try:
        return named.remote(name, store, **monitor_arguments)
    except ValueError:  # Ray has no other error for a name that is taken
        raise UsageError(
            f"Run {name!r} is training in this cluster already; stop it first, or choose another --name."
        ) from None


def stop_coordinator(coordinator: CoordinatorHandle) -> None:
    """End the coordinator's process."""
    ray.kill(coordinator)  # pyright: ignore[reportArgumentType] ; Ray types a handle as handle or class


class RayMonitor:
    """The coordinator of a run as the driver calls it: each method calls the coordinator's of the same name.

    All but :meth:`note_event` wait for its answer, in a context of ``needs_coordinator``, the function of this name for
    the run: it raises :class:`CoordinatorLost` if the coordinator has died.
    """

    def __init__(
        self, coordinator: CoordinatorHandle, needs_coordinator: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._coordinator = coordinator
        self._needs_coordinator = needs_coordinator

    def note_event(self, event: Event) -> None:
        """Note something that a viewer should read, without waiting."""
        self._coordinator.note_event.remote(event)

    def snapshot(self, since: RowCursor = START) -> Snapshot:
        return self._ask(self._coordinator.snapshot, since)

    def wait_for_end(self, timeout_s: float) -> None:
        self._ask(self._coordinator.wait_for_end, timeout_s)

    def ending(self) -> Ending:
        return self._ask(self._coordinator.ending)

    def take_printed(self) -> list[PrintedLine | LoggedRecord]:
        return self._ask(self._coordinator.take_printed)

    def request_stop(self, request: StopReason) -> None:
        self._ask(self._coordinator.request_stop, request)

    def note_skipped(self, images: list[SkippedImage]) -> None:
        self._ask(self._coordinator.note_skipped, images)

    def finish(self, status: Status, result: TrainResult | None = None) -> None:
        self._ask(self._coordinator.finish, status, result)

    def _ask(self, method: Any, *arguments: object) -> Any:
        with self._needs_coordinator():
            return ray.get(method.remote(*arguments))


@contextmanager
def needs_coordinator(prepared: PreparedRun, coordinated: str = "it", command: str = "train") -> Generator[None]:
    """Raise :class:`CoordinatorLost` if the coordinator of a run dies before the ``with`` block has its answers.

    The coordinator may die as soon as it begins, so each call whose answer the driver waits for is in such a block. If
    the whole node has died, nothing can be started there again, and TrainingFailed is raised.

    The sentence says that the process that coordinates ``coordinated`` has died ("it" is the run; a sweep has "its
    trials"), and how the subcommand ``command`` of raytrain resumes the run.
    """
    try:
        yield
    except LOST_ACTOR as error:
        config, name, url = prepared.config, prepared.name, prepared.store.url
        if not raylet_answers():
            # A Ray of this process starts with the next run. Another one has to be started by the user.
            advice = "; start Ray again with `ray start`" if is_connected() else ""
            reason = f"Ray's process on this machine, the raylet, has died, as if for lack of memory{advice}"
            sentence = failure_sentence(config, reason, prepared.loop, command=command)
            raise TrainingFailed(sentence, {"name": name, "status": "failed", "run_dir": url}) from None
        reason = f"the process that coordinates {coordinated} has died"
        if isinstance(error, OutOfMemoryError):
            reason += ": Ray has ended it because the machine's memory was nearly full"
        sentence = failure_sentence(config, reason, prepared.loop, command=command)
        raise CoordinatorLost(sentence, name, url) from None


def request_stop_in_cluster(name: str, storage: str, address: str, request: StopReason) -> None:
    """Ask a run that trains in the connected cluster to stop.

    Raises UsageError if there is none of this name with this ``storage``, or if its coordinator has just died.
    ``address`` is that of the cluster, for the error.
    """
    try:
        actor_name = _actor_name(name, run_store(storage, name).url)
        coordinator: CoordinatorHandle = ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:
        raise UsageError(
            f"No run called {name!r} is training in the cluster at {address} with --storage {storage}; give the "
            "--storage that it was started with, whose runs `raytrain runs` lists."
        ) from None
    try:
        ray.get(coordinator.request_stop.remote(request))
    except LOST_ACTOR:
        raise UsageError(
            f"The process that coordinates run {name!r} has just died, so that the request did not reach the run; "
            "leave --address out, and the request waits in the run's storage."
        ) from None


def _actor_name(run: str, url: str) -> str:
    """Return the name of a run's actor: others may have runs of the same name in this cluster, in other storage."""
    return f"run:{run}:{hashlib.sha256(url.encode()).hexdigest()[:16]}"
