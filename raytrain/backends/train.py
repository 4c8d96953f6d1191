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
from typing import TYPE_CHECKING, Any

from raytrain.backends.gpus import visible_gpus
from raytrain.backends.machine import machine_hardware
from raytrain.backends.placement import Hardware, check_room
from raytrain.backends.prepare import Loop, PreparedRun, RunGroup, check_asked, check_places, prepare, refuse_sweep
from raytrain.backends.ray.connection import connection, is_connected
from raytrain.backends.session import RunSession
from raytrain.backends.stop_signals import StopSignals
from raytrain.config import TrainConfig
from raytrain.errors import CoordinatorLost, TrainingFailed
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.snapshot import View
from raytrain.runs.startup_log import STARTUP
from raytrain.runs.status import mark_failed
from raytrain.runs.stop_request import request_stop
from raytrain.runs.trackers.open_trackers import open_trackers
from raytrain.runs.trackers.protocol import Tracker

if TYPE_CHECKING:
    from raytrain.training.run import Run

Prepare = Callable[[TrainConfig], PreparedRun]
"""Lists the images of a run, and makes it this process's own."""
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
    check_asked(config, loop)
    refuse_sweep(config)
    return train_group(
        config,
        None,
        loop=loop,
        view=view,
        signals=signals,
        trackers=trackers,
        started_at=started_at or time.monotonic(),
    )


def train_group(
    config: TrainConfig,
    group: RunGroup | None,
    *,
    loop: Loop | None = None,
    signals: StopSignals | None = None,
    trackers: Sequence[str | Tracker] = (),
    **options: Any,
) -> TrainResult:
    """Train, again in more parts as long as the memory does not suffice.

    Several threads may do so at once for runs of one ``group``. Takes and raises what :func:`train` does.
    """
    asked = partial(prepare, group=group, loop=loop, signals=signals or StopSignals(), **options)
    fits_by_trial = config.accumulate == "auto"
    while True:
        opened = open_trackers([*config.track, *trackers])
        try:
            return _train(config, partial(asked, trackers=opened))
        except TrainingFailed as failed:
            if not fits_by_trial or failed.summary.get("accumulate") is None:
                raise
            config = _in_more_parts(config, failed)


def _train(config: TrainConfig, prepare: Prepare) -> TrainResult:
    """Train, and start the run again if its coordinator is lost, as long as that may help."""
    attempts_left = 1 + config.max_failures
    train_once = _train_locally if config.backend == "local" else _train_on_ray
    while True:
        config = check_places(config)
        try:
            return train_once(config, prepare)
        except CoordinatorLost as lost:
            attempts_left -= 1
            if not attempts_left or is_connected():  # what is left of the run is in a cluster that stays
                mark_failed(config.storage, lost.name)
                raise
            config = dataclasses.replace(config, resume=True)
            prepare = partial(prepare, restarting=True)


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
    with connection(config.address, config.gpus) as cluster:
        importing = import_in_background("raytrain.backends.ray.ray_launch")

        def join() -> Hardware:
            importing.join()
            cluster.connect()
            from raytrain.backends.ray.hardware import cluster_hardware

            return cluster_hardware()

        yield join


def _train_locally(config: TrainConfig, prepare: Prepare) -> TrainResult:
    """Train on this machine. The agent that starts the workers imports torch while the data is listed."""
    from raytrain.backends.local.agent_process import AgentProcess

    check_room(config, machine_hardware(config.gpus))
    agent = AgentProcess(visible_gpus(config.gpus) if config.gpus else {})
    with closing(agent), prepare(config) as prepared:
        from raytrain.backends.local.local_launch import LocalLaunch

        with prepared.signals, RunSession(prepared, LocalLaunch(prepared, agent)) as session:
            return session.watch()


def _train_on_ray(config: TrainConfig, prepare: Prepare) -> TrainResult:
    """Train on a Ray cluster. It starts, and Ray and torch are imported, while the data is listed."""
    check = partial(check_room, config, machine_hardware(config.gpus))
    with connection(config.address, config.gpus, check) as cluster:
        importing = import_in_background("raytrain.backends.ray.ray_launch")
        with prepare(config) as prepared:
            STARTUP.info("importing Ray and torch …")
            importing.join()
            cluster.connect()
            from raytrain.backends.ray.ray_launch import RayLaunch
            from raytrain.backends.ray.wait_for_machines import wait_for_machines

            with prepared.signals as signals:
                STARTUP.info("starting the workers …")
                wait_for_machines(config, lambda: signals.stop_request is not None)
                with RunSession(prepared, RayLaunch(prepared, cluster)) as session:
                    return session.watch()
