"""`raytrain.train`, `raytrain.stop`, and a run beside its caller with a handle."""

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
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.config.values import Location
from raytrain.errors import CoordinatorLost, TrainingFailed
from raytrain.launch.placement import Hardware, check_room, machine_hardware, visible_gpus
from raytrain.launch.prepare import Start, already_trained, check_asked, check_places, prepare, refuse_sweep
from raytrain.launch.ray.connection import Connection
from raytrain.launch.session import RunSession
from raytrain.monitor.snapshot import Snapshot, View
from raytrain.monitor.stop_request import StopSignals, request_stop
from raytrain.runs.logs import STARTUP
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.status import mark_failed
from raytrain.trackers.open_trackers import Trackers, open_trackers

if TYPE_CHECKING:
    from raytrain.training.run import Run

_LOG = logging.getLogger("raytrain")


def train(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
    trackers: Trackers = (),
    started_at: float | None = None,
) -> TrainResult:
    """Train as ``config`` says, and return when the run is finished or has stopped with a checkpoint.

    It trains on Ray, or without Ray on this machine if ``config.backend`` is ``local``.

    Args:
        config: the options; see :class:`TrainConfig`.
        loop: a training loop to use instead of the built-in one (``raytrain/training/loop.py``) or the one that
            ``config`` names.
        view: called about twice a second with the run's :class:`Snapshot`.
        signals: where stop requests come from; by default Ctrl-C and SIGTERM, if this is the main thread.
        trackers: where else to send metrics, besides those that ``config.track`` names: names like those, or objects
            with the methods of :class:`raytrain.trackers.tracker.Tracker`, such as Lightning's loggers.
        started_at: since when the run's time counts, as ``time.monotonic()`` tells it; now by default.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the run ended early; the sentence says why and how to resume.
    """
    started_at = time.monotonic() if started_at is None else started_at
    start = Start(loop=loop, view=view, signals=signals or StopSignals(), started_at=started_at)
    check_asked(config, loop)
    refuse_sweep(config)
    return start_run(config, start, trackers)


def start_run(config: TrainConfig, start: Start, trackers: Trackers = ()) -> TrainResult:
    """Train, again in more parts as long as the memory does not suffice."""
    fits_by_trial = config.accumulate == "auto"
    while True:
        opened = open_trackers(config.track, trackers)
        try:
            return _train(config, dataclasses.replace(start, trackers=opened))
        except TrainingFailed as failed:
            if not fits_by_trial or failed.summary.get("accumulate") is None:
                raise
            config = _in_more_parts(config, failed)


def _train(config: TrainConfig, start: Start) -> TrainResult:
    """Train, and start the run again if its coordinator is lost, as long as that may help."""
    attempts_left = 1 + config.max_failures
    train_once = _train_locally if config.backend == "local" else _train_on_ray
    while True:
        config = check_places(config)
        if start.group is None and not start.restarting and (result := already_trained(config)) is not None:
            return result
        try:
            return train_once(config, start)
        except CoordinatorLost as lost:
            attempts_left -= 1
            if not attempts_left:
                mark_failed(config.storage, lost.name)
                raise
            config = dataclasses.replace(config, resume=True)
            start = dataclasses.replace(start, restarting=True)


def _in_more_parts(config: TrainConfig, failed: TrainingFailed) -> TrainConfig:
    """The options with which a run continues for which the memory did not suffice."""
    name, parts = failed.summary["name"], failed.summary["accumulate"]
    _LOG.warning(
        "Run %r does not fit into memory: it goes on from its last checkpoint with --accumulate %d.", name, parts
    )
    return dataclasses.replace(config, name=name, resume=True, accumulate=parts)


def stop(name: str, *, storage: Location = "./runs", address: str | None = None, reason: str | None = None) -> None:
    """Ask a run to stop with a checkpoint, through its storage or, given an ``address``, through its cluster.

    Either way, ``storage`` and ``name`` say which run. ``reason`` is for whoever looks at it later; by default it is
    this host.
    """
    storage = os.fspath(storage)
    request = StopReason("caller", reason) if reason else StopReason("command", socket.gethostname())
    if address is None:
        request_stop(storage, name, request)
        return
    with Connection(address) as cluster:
        cluster.connect()
        from raytrain.launch.ray.coordinator import request_stop_in_cluster

        request_stop_in_cluster(name, storage, address, request)


@contextmanager
def _cluster(config: TrainConfig, check: Callable[[], None] | None = None) -> Iterator[Callable[[], Connection]]:
    """A cluster, while open; yields a function that joins it. Imports Ray and torch, which is slow, while it starts."""
    with Connection(config.address, config.gpus, check) as cluster:
        # Not a daemon: Python would stop it in the middle of an import, and then wait for that import's lock for ever.
        importing = Thread(target=importlib.import_module, args=("raytrain.launch.ray.ray_launch",), name="imports")
        importing.start()

        def join() -> Connection:
            importing.join()
            cluster.connect()
            return cluster

        yield join


@contextmanager
def open_machines(config: TrainConfig) -> Iterator[Callable[[], Hardware]]:
    """The machines of several runs, while open; yields a function that waits for them and returns their hardware."""
    if config.backend == "local":
        yield partial(machine_hardware, config.gpus)
        return
    with _cluster(config) as join:

        def hardware() -> Hardware:
            join()
            from raytrain.launch.ray.nodes import cluster_hardware

            return cluster_hardware()

        yield hardware


def _train_locally(config: TrainConfig, start: Start) -> TrainResult:
    """Train on this machine. The agent that starts the workers imports torch while the data is listed."""
    from raytrain.launch.local.local_launch import AgentProcess, LocalLaunch

    check_room(config, machine_hardware(config.gpus))
    agent = AgentProcess(visible_gpus(config.gpus) if config.gpus else {})
    with closing(agent), prepare(config, start) as prepared:
        STARTUP.info("starting the workers …")
        with prepared.signals, RunSession(prepared, LocalLaunch(prepared, agent)) as session:
            return session.watch()


def _train_on_ray(config: TrainConfig, start: Start) -> TrainResult:
    """Train on a Ray cluster. It starts, and Ray and torch are imported, while the data is listed."""
    check = partial(check_room, config, machine_hardware(config.gpus))
    with _cluster(config, check) as join, prepare(config, start) as prepared:
        STARTUP.info("importing Ray and torch …")
        cluster = join()
        from raytrain.launch.ray.cluster_watch import wait_for_machines
        from raytrain.launch.ray.ray_launch import RayLaunch

        with prepared.signals as signals:
            STARTUP.info("starting the workers …")
            wait_for_machines(config, lambda: signals.stop_request is not None)
            with RunSession(prepared, RayLaunch(prepared, cluster)) as session:
                return session.watch()


class RunHandle:
    """A run that trains in a thread of this process; :func:`raytrain.start` makes one.

    ``await handle`` is :meth:`result` for asynchronous code. In a notebook it leaves the kernel free for a Stop button.
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
        """How the run stands, half a second old at most; None while it is starting."""
        self._result: Future[TrainResult] = Future()
        self._thread = Thread(target=self._train, args=(config, loop), name="raytrain", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the run has ended, one way or another."""
        return self._result.done()

    def stop(self, reason: str = "stop() of its handle") -> None:
        """Ask the run to stop with a checkpoint; returns at once."""
        self._signals.request_stop(StopReason("caller", reason))

    def result(self, timeout_s: float | None = None) -> TrainResult:
        """Wait for the run's end. Raises what :func:`raytrain.train` raises, and TimeoutError after ``timeout_s``."""
        wait([self._result], timeout_s)
        if not self.done:  # not the future's own: in Python 3.10 that is no TimeoutError
            raise TimeoutError(f"The run has not ended within {timeout_s} s; stop() asks it to.")
        return self._result.result()

    def __await__(self) -> Generator[Any, None, TrainResult]:
        return asyncio.shield(asyncio.wrap_future(self._result)).__await__()

    def _train(self, config: TrainConfig, loop: Callable[[Run], None] | None) -> None:
        try:
            result = train(config, loop=loop, view=self._update, signals=self._signals, trackers=self._trackers)
            self._result.set_result(result)
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)  # first: who waits for the result may end this process
            self._result.set_exception(error)

    def _update(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self._view is not None:
            self._view(snapshot)
