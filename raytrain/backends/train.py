"""``raytrain.train`` and ``raytrain.stop``: a run from start to end, as the process that a user starts sees it.

Imports neither Ray nor torch before it must.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from raytrain.backends.gpus import visible_gpus
from raytrain.backends.machine import machine_hardware
from raytrain.backends.placement import Hardware, check_room
from raytrain.backends.prepare import check, check_places, load_loop, prepare
from raytrain.backends.ray.connection import connection, is_connected
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train_request import TrainRequest
from raytrain.config import TrainConfig
from raytrain.errors import CoordinatorLost, TrainingFailed, UsageError
from raytrain.runs.documents import run_store
from raytrain.runs.layout import SWEEP
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.snapshot import View
from raytrain.runs.startup_log import STARTUP
from raytrain.runs.status import mark_failed
from raytrain.runs.stop_request import request_stop
from raytrain.runs.trackers.open_trackers import open_trackers
from raytrain.runs.trackers.protocol import Tracker

if TYPE_CHECKING:
    from raytrain.training.run import Run

_LOG = logging.getLogger("raytrain")


def train(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
    trackers: Sequence[str | Tracker] = (),
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
            with the methods of :class:`raytrain.runs.trackers.protocol.Tracker`, such as Lightning's loggers.
        started_at: since when the run's time counts, as ``time.monotonic()`` tells it; now by default.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the run ended early; the sentence says why and how to resume.
    """
    started_at = time.monotonic() if started_at is None else started_at
    check(config, loop)
    if config.resume and config.name and run_store(config.storage, config.name).exists(SWEEP):
        raise UsageError(
            f"{config.name!r} is a sweep; resume it with `raytrain sweep … --resume`, or choose another --name."
        )
    signals = signals or StopSignals()
    opened = open_trackers([*config.track, *trackers])
    request = TrainRequest(config=config, loop=loop, view=view, signals=signals, trackers=opened, started_at=started_at)
    return train_request(request, trackers)


def train_request(request: TrainRequest, trackers: Sequence[str | Tracker] = ()) -> TrainResult:
    """Train, again in more parts as long as the memory does not suffice; ``trackers`` are those of the caller.

    Several threads may do so at once for runs of one :class:`RunGroup`. Raises what :func:`train` raises.
    """
    fits_by_trial = request.config.accumulate == "auto"
    while True:
        try:
            return _train(request)
        except TrainingFailed as failed:
            if not fits_by_trial or failed.summary.get("accumulate") is None:
                raise
            config = _in_more_parts(request.config, failed)
            request = dataclasses.replace(request, config=config, trackers=open_trackers([*config.track, *trackers]))


def _train(request: TrainRequest) -> TrainResult:
    return _train_locally(request) if request.config.backend == "local" else _train_on_ray(request)


def _in_more_parts(config: TrainConfig, failed: TrainingFailed) -> TrainConfig:
    """The options with which a run continues for which the memory did not suffice."""
    name, parts = failed.summary["name"], failed.summary["accumulate"]
    _LOG.warning(
        "Run %r does not fit into memory: it goes on from its last checkpoint with --accumulate %d.", name, parts
    )
    return dataclasses.replace(config, name=name, resume=True, accumulate=parts)


def stop(name: str, *, storage: str = "./runs", address: str | None = None, reason: str | None = None) -> None:
    """Ask a run to stop with a checkpoint, through its storage or, given an ``address``, through its cluster.

    Either way, ``storage`` and ``name`` say which run. ``reason`` is for whoever looks at it later; by default it is
    this host.
    """
    request = StopReason("caller", reason) if reason else StopReason("command", socket.gethostname())
    if address is None:
        request_stop(storage, name, request)
        return
    with connection(address) as cluster:
        cluster.connect()
        from raytrain.backends.ray.coordinator import request_stop_in_cluster

        request_stop_in_cluster(name, storage, address, request)


def import_in_background(module: str) -> threading.Thread:
    """Import ``module`` with Ray and torch, the slowest part of a start, while the cluster starts."""
    # Not a daemon: Python would stop it in the middle of an import, and then wait for that import's lock for ever.
    thread = threading.Thread(target=importlib.import_module, args=(module,), name="imports")
    thread.start()
    return thread


@contextmanager
def open_machines(config: TrainConfig) -> Iterator[Callable[[], Hardware]]:
    """The machines of several runs: this one with the local backend, otherwise a Ray cluster that all of them use.

    Yields a function that waits until the cluster is there, and returns its hardware; until then, it starts.
    """
    if config.backend == "local":
        yield partial(machine_hardware, config.gpus)
        return
    with connection(config.address, config.gpus, partial(check_places, config)) as cluster:
        importing = import_in_background("raytrain.backends.ray.session")

        def join() -> Hardware:
            importing.join()
            cluster.connect()
            from raytrain.backends.ray.hardware import cluster_hardware

            return cluster_hardware()

        yield join


def _train_locally(request: TrainRequest) -> TrainResult:
    """Train on this machine. The agent that starts the workers imports torch while the data is listed."""
    from raytrain.backends.local.agent_process import AgentProcess

    gpus = request.config.gpus
    check_room(request.config, machine_hardware(gpus))
    agent = AgentProcess(visible_gpus(gpus) if gpus else {})
    with closing(agent), prepare(request.config, shared=request.group and request.group.data) as prepared:
        from raytrain.backends.local.session import LocalSession

        with request.signals, LocalSession(prepared, request, agent) as session:
            return session.watch()


def _train_on_ray(request: TrainRequest) -> TrainResult:
    """Train, and start the run again if its coordinator is lost, as long as that may help."""
    attempts_left = 1 + request.config.max_failures
    restarting = False
    while True:
        try:
            return _attempt(request, restarting=restarting)
        except CoordinatorLost as lost:
            attempts_left -= 1
            restarting = True
            if not attempts_left or is_connected():  # what is left of the run is in a cluster that stays
                mark_failed(request.config.storage, lost.name)
                raise
            config = dataclasses.replace(request.config, name=lost.name, resume=True)
            request = dataclasses.replace(request, config=config)
            if lost.stop_reason is not None:
                request.signals.request_stop(lost.stop_reason)


def _attempt(request: TrainRequest, *, restarting: bool) -> TrainResult:
    config, signals = request.config, request.signals

    def check_before_start() -> None:
        check_room(config, machine_hardware(config.gpus))
        check_places(config)

    with connection(config.address, config.gpus, check_before_start) as cluster:
        importing = import_in_background("raytrain.backends.ray.session")
        with prepare(config, restarting=restarting, shared=request.group and request.group.data) as prepared:
            STARTUP.info("importing Ray and torch …")
            importing.join()
            request = dataclasses.replace(request, loop=load_loop(config, request.loop))
            cluster.connect()
            from raytrain.backends.ray.session import RunSession
            from raytrain.backends.ray.wait_for_machines import wait_for_machines

            with signals:
                STARTUP.info("starting the workers …")
                wait_for_machines(config, lambda: signals.stop_request is not None)
                with RunSession(prepared, request, cluster) as session:
                    return session.watch()
