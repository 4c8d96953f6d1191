"""`raytrain.train`, `raytrain.stop`, and a handle of a run that trains in a thread.

Each function on the path of a run adds one thing: :func:`train` checks the options, :func:`start_run` opens trackers
and starts the run again with more microbatches if memory does not suffice, ``_train_with_restarts`` starts it again if
its coordinator is lost, and ``_train_on_ray`` or ``_train_locally`` prepares it, starts its workers, and watches it to
its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.config.option_values import Location
from raytrain.errors import CoordinatorLost, TrainingFailed, UsageError
from raytrain.launch.gpus import visible_gpus
from raytrain.launch.option_checks import check_options
from raytrain.launch.placement import Hardware, check_room, machine_hardware
from raytrain.launch.prepare import TrainRequest, prepare, settle_options
from raytrain.launch.ray.connection import Connection
from raytrain.launch.resumed_options import already_trained
from raytrain.launch.session import RunSession
from raytrain.monitor.snapshot import Snapshot, View
from raytrain.monitor.stop_request import StopSignals, request_stop
from raytrain.runs.documents import SWEEP, run_store
from raytrain.runs.logs import STARTUP
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.status import mark_failed
from raytrain.trackers.open_trackers import Trackers, open_trackers

if TYPE_CHECKING:
    from raytrain.training.run import Run

_log = logging.getLogger("raytrain")


def train(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
    trackers: Trackers = (),
    started_at: float | None = None,
) -> TrainResult:
    """Train like :func:`raytrain.train`, where the arguments are described; without a ``view``, show nothing.

    ``signals`` is where requests to stop come from: by default, from signals such as Ctrl-C. ``started_at`` is when the
    user started the run, by ``time.monotonic()``; by default now.

    Example: ``train(config, view=lambda snapshot: print(snapshot.step))``
    """
    started_at = time.monotonic() if started_at is None else started_at
    check_options(config, loop)
    if config.resume and config.name and run_store(config.storage, config.name).exists(SWEEP):
        raise UsageError(
            f"{config.name!r} is a sweep; resume it with `raytrain sweep … --resume`, or choose another --name."
        )
    request = TrainRequest(loop=loop, view=view, signals=signals or StopSignals(), started_at=started_at)
    return start_run(config, request, trackers)


def start_run(config: TrainConfig, request: TrainRequest, trackers: Trackers = ()) -> TrainResult:
    """Train; with ``--accumulate auto``, start again with more microbatches as long as memory does not suffice.

    The options are checked already, by :func:`check_options`. Raises what :func:`raytrain.train` does.
    """
    chooses_microbatches = config.accumulate == "auto"
    while True:
        # Trackers are opened for each start, because they are closed at its end.
        opened = open_trackers(config.track, trackers)
        try:
            return _train_with_restarts(config, dataclasses.replace(request, trackers=opened))
        except TrainingFailed as failed:
            name, microbatches = failed.summary.get("name"), failed.summary.get("accumulate")
            if not chooses_microbatches or microbatches is None:
                raise
            # The workers have found a number of microbatches that may fit.
            _log.warning(
                "Run %r does not fit into memory: it goes on from its last checkpoint with --accumulate %d.",
                name,
                microbatches,
            )
            config = dataclasses.replace(config, name=name, resume=True, accumulate=microbatches)
            request = dataclasses.replace(request, restarting=True)


def _train_with_restarts(config: TrainConfig, request: TrainRequest) -> TrainResult:
    """Train; start the run again if its coordinator is lost, up to ``--max-failures`` times.

    After that many times, mark the run as failed, and raise CoordinatorLost. A resumed run that has nothing to do is
    not started: warn, and return its earlier result.
    """
    train_once = _train_locally if config.backend == "local" else _train_on_ray
    restarts_left = config.max_failures
    while True:
        config = settle_options(config)
        # A resume may have nothing to do. Trials of a sweep were checked before, and a restart always has work left.
        if request.group is None and not request.restarting and (ended := already_trained(config)) is not None:
            result, sentence = ended
            _log.warning(sentence)
            return result
        try:
            return train_once(config, request)
        except CoordinatorLost as lost:
            if restarts_left <= 0:
                mark_failed(config.storage, lost.name)
                raise
            _log.warning(
                "Run %r has lost the process that coordinates it or starts its workers; it restarts.", lost.name
            )
            restarts_left -= 1
            config = dataclasses.replace(config, resume=True)
            request = dataclasses.replace(request, restarting=True)


def _train_locally(config: TrainConfig, request: TrainRequest) -> TrainResult:
    """Train on this machine. The agent that starts the workers imports torch while the images are listed."""
    from raytrain.launch.local.local_launch import AgentProcess, LocalLaunch

    # Too many workers are refused before any process starts.
    check_room(config, machine_hardware(config.gpus))
    agent = AgentProcess(visible_gpus(config.gpus) if config.gpus else {})
    with closing(agent), prepare(config, request) as prepared:
        STARTUP.info("starting the workers …")
        with prepared.signals, RunSession(prepared, LocalLaunch(prepared, agent)) as session:
            return session.watch()


def _train_on_ray(config: TrainConfig, request: TrainRequest) -> TrainResult:
    """Train on a Ray cluster. The cluster starts, and Ray and torch are imported, while the images are listed."""
    hardware = machine_hardware(config.gpus)
    with _cluster(config, lambda: check_room(config, hardware)) as join, prepare(config, request) as prepared:
        # The images are listed: now wait for the imports and the cluster.
        STARTUP.info("importing Ray and torch …")
        cluster = join()
        from raytrain.launch.ray.cluster_watch import RayletWatch, wait_for_machines
        from raytrain.launch.ray.ray_launch import RayLaunch

        # From here on, Ctrl-C asks the run to stop.
        with prepared.signals as signals:
            STARTUP.info("starting the workers …")
            wait_for_machines(config, lambda: signals.stop_request is not None)
            watch = RayletWatch(is_own=cluster.own is not None)
            with closing(watch), RunSession(prepared, RayLaunch(prepared, cluster)) as session:
                watch.note_started()
                return session.watch()


@contextmanager
def _cluster(config: TrainConfig, check: Callable[[], None] | None = None) -> Iterator[Callable[[], Connection]]:
    """Open a cluster, import Ray and torch in a thread, which takes seconds, and yield a function that waits for both.

    That function connects this process to the cluster, and returns the connection. ``check`` is called before a cluster
    of this machine alone is used; it may raise UsageError to prevent that.
    """
    with Connection(config.address, config.gpus, check) as cluster:
        # Not a daemon thread: when the process ends, Python would stop such a thread in the middle of an import, and
        # then hang at the import's lock.
        importing = Thread(target=importlib.import_module, args=("raytrain.launch.ray.ray_launch",), name="imports")
        importing.start()

        def join() -> Connection:
            importing.join()
            cluster.connect()
            return cluster

        yield join


@contextmanager
def open_machines(config: TrainConfig) -> Iterator[Callable[[], Hardware]]:
    """Open the machines of several runs, and yield a function that waits for them and returns their hardware.

    On Ray, they are a cluster, which starts while the caller does something else.
    """
    if config.backend == "local":
        yield lambda: machine_hardware(config.gpus)
        return
    with _cluster(config) as join:

        def hardware() -> Hardware:
            join()
            from raytrain.launch.ray.nodes import cluster_hardware

            return cluster_hardware()

        yield hardware


def stop(name: str, *, storage: Location = "./runs", address: str | None = None, reason: str | None = None) -> None:
    """Ask a run, or all trials of a sweep, to stop with a checkpoint; do not wait until they have.

    Args:
        name: the name of the run or the sweep.
        storage: where the run is stored; it looks for requests there every second.
        address: the Ray cluster on which the run trains, to ask its coordinator directly; not for a sweep. By default,
            the request is only written into its storage.
        reason: a text that the run shows as the reason of its stop; by default the name of this host.

    Raises:
        UsageError: there is no such run, or it does not train.
        StorageError: its storage cannot be used.

    Example:
        >>> raytrain.stop("digits", reason="accurate enough")
    """
    storage = os.fspath(storage)
    request = StopReason("caller", reason) if reason else StopReason("command", socket.gethostname())
    # Leave the request in storage, or pass it to the run's coordinator.
    if address is None:
        request_stop(storage, name, request)
        return
    with Connection(address) as cluster:
        cluster.connect()
        from raytrain.launch.ray.coordinator import request_stop_in_cluster

        request_stop_in_cluster(name, storage, address, request)


class RunHandle:
    """A run that trains in a thread of this process; :func:`raytrain.start` makes one.

    ``on_failure`` is called in that thread with the exception by which the run ends, if any. ``await handle`` is
    :meth:`result` for asynchronous code. In a notebook it leaves the kernel free for a Stop button.

    Example:
        >>> handle = raytrain.start(config)
        >>> handle.stop()
        >>> result = handle.result()
    """

    def __init__(
        self,
        config: TrainConfig,
        loop: Callable[[Run], None] | None,
        view: View | None,
        trackers: Trackers = (),
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._view = view
        self._on_failure = on_failure
        self._trackers = trackers
        self._signals = StopSignals()
        self.snapshot: Snapshot | None = None
        """The state of the run, half a second old at most; None while it is starting."""
        self._result: Future[TrainResult] = Future()
        self._thread = Thread(target=self._train, args=(config, loop), name="raytrain", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Return how far the run is, because a notebook shows this text below a cell."""
        if self.done and self._result.exception() is not None:
            state = str(self._result.exception())
        elif self.snapshot is None:
            state = "starting"
        else:
            run = self.snapshot
            state = f"{run.name!r}, {run.status}, step {run.step}/{run.num_steps}"
        return f"{type(self).__name__}({state})"

    @property
    def done(self) -> bool:
        """True if the run has ended, also by an error."""
        return self._result.done()

    def stop(self, reason: str = "stop() of its handle") -> None:
        """Ask the run to stop with a checkpoint; return at once."""
        self._signals.request_stop(StopReason("caller", reason))

    def result(self, timeout_s: float | None = None) -> TrainResult:
        """Wait for the run's end, and return its result.

        Raises what :func:`raytrain.train` raises, and TimeoutError after ``timeout_s`` seconds.
        """
        # Future.result(timeout_s) would raise an exception that in Python 3.10 is no builtin TimeoutError.
        wait([self._result], timeout_s)
        if not self.done:
            raise TimeoutError(f"The run has not ended within {timeout_s} s; stop() asks it to.")
        return self._result.result()

    def __await__(self) -> Generator[Any, None, TrainResult]:
        return asyncio.shield(asyncio.wrap_future(self._result)).__await__()

    def _train(self, config: TrainConfig, loop: Callable[[Run], None] | None) -> None:
        """Train, and set the result or the exception. Runs in a thread."""
        try:
            result = train(config, loop=loop, view=self._update, signals=self._signals, trackers=self._trackers)
            self._result.set_result(result)
        except BaseException as error:
            try:
                if self._on_failure is not None:
                    self._on_failure(error)  # before the result is set, after which the caller may end this process
            finally:  # whoever waits for the result must get one
                self._result.set_exception(error)

    def _update(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self._view is not None:
            self._view(snapshot)
