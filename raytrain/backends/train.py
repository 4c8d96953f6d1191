"""A run from beginning to end, as the process that a user starts sees it. Imports neither Ray nor torch before it must."""

from __future__ import annotations

import dataclasses
import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.backends.ray.cluster import Connection, connection, is_connected
from raytrain.backends.stop_signals import StopSignals
from raytrain.config import TrainConfig
from raytrain.errors import MonitorLost, UsageError
from raytrain.runs import records
from raytrain.runs.layout import CONFIG, SWEEP
from raytrain.training.user_function import load_function

if TYPE_CHECKING:
    from raytrain.data.dataset import Dataset
    from raytrain.runs.monitor import Snapshot
    from raytrain.storage.base import Store
    from raytrain.training.run import Run

View = Callable[["Snapshot"], None]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended; the same names as in its summary.json."""

    name: str
    status: str
    steps: int
    epochs: float
    samples_seen: int
    test_accuracy: float | None
    test_loss: float | None
    checkpoint: str | None
    run_dir: str
    seconds: float
    num_workers: int
    num_skipped: int = 0
    num_retries: int = 0
    stop_reason: str | None = None
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        """The result as a dictionary of plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class PreparedRun:
    """A run that may start: its place in storage is its own, and its data can be read.

    ``again`` says that this process began it before, and what has been asked of the run since still holds.
    """

    config: TrainConfig
    name: str
    store: Store
    data: Dataset
    first_step: int
    again: bool = False


def train(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
) -> TrainResult:
    """Train as ``config`` says, and return when the run is finished or has stopped with a checkpoint.

    Args:
        config: the options; see :class:`TrainConfig`.
        loop: a training loop to use instead of the built-in one (``raytrain/training/loop.py``) or the one that ``config`` names.
        view: called about twice a second with the run's :class:`Snapshot`.
        signals: hears of stop requests; by default Ctrl-C and SIGTERM, where this is the main thread.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the run ended before its time; the sentence says why and how to go on.
    """
    begun = time.monotonic()
    check(config, loop)
    if config.resume and config.name and records.run_store(config.storage, config.name).exists(SWEEP):
        raise UsageError(f"{config.name!r} is a sweep; go on with it with `raytrain sweep … --resume`, or choose another --name.")
    signals = signals or StopSignals()
    # What is left of a run in a cluster ends with the connection; where that is not ours, its workers are still there.
    lives = 1 if is_connected() else 1 + config.max_failures
    again = False
    while True:
        try:
            return _train(config, loop, view, signals, begun, again)
        except MonitorLost as lost:
            lives -= 1
            again = True
            if not lives:
                records.mark_failed(config.storage, lost.summary["name"])
                raise
            config = dataclasses.replace(config, name=lost.summary["name"], resume=True)
            signals.reason = signals.reason or lost.summary["stop_reason"]


def _train(
    config: TrainConfig, loop: Callable[[Run], None] | None, view: View | None, signals: StopSignals, begun: float, again: bool
) -> TrainResult:
    with connection(config.address, config.gpus) as cluster:
        importing = import_beside("raytrain.backends.ray.session")
        prepared = prepare(config, again)
        importing.join()
        if config.loop and loop is None:
            loop = load_function("--loop", config.loop)
        cluster.connect()
        from raytrain.backends.ray.session import Session

        with signals, Session(prepared, loop, begun, own_cluster=cluster.started_here) as session:
            return session.watch(signals, view)


def stop(name: str, *, storage: str = "./runs", address: str | None = None, reason: str = "raytrain stop") -> None:
    """Ask a run to stop with a checkpoint, through its storage or, with ``address``, through the cluster that it trains in."""
    if address is None:
        return records.request_stop(storage, name, reason)
    cluster = Connection(address)
    try:
        cluster.connect()
        _stop_in_cluster(name, address, reason)
    finally:
        cluster.close()


def prepare(config: TrainConfig, again: bool = False) -> PreparedRun:
    """Check all that can be checked without a cluster: the run's place in storage, and that its data can be read.

    ``again`` says that it is this process that the run's status speaks of.
    """
    from raytrain.data.dataset import open_dataset
    from raytrain.storage.base import open_store

    name = config.name or records.new_name(config.recipe)
    open_store(config.storage).check_writable()
    store = records.run_store(config.storage, name)
    exists = store.exists(CONFIG)
    if exists and not config.resume:
        raise UsageError(f"A run called {name!r} is in {config.storage} already; go on with it with --resume, or choose another --name.")
    if config.resume and not exists:
        raise UsageError(f"--resume: there is no run called {name!r} in {config.storage}; `raytrain runs` lists those that are.")
    if exists:
        if not again and records.read_status(store).active:
            raise UsageError(f"Run {name!r} is training at this moment; `raytrain stop {name}` stops it.")
        config = _continued(config, records.read_config(store))
    data = open_dataset(config, store)
    config = dataclasses.replace(config, name=name, mean=data.mean, std=data.std)
    return PreparedRun(config, name, store, data, records.newest_step(store), again)


def check(config: TrainConfig, loop: Callable[[Run], None] | None = None) -> None:
    """Raise UsageError for options that no run can be started with, as far as they alone tell it."""
    check_named(config)
    if loop is None and config.loop is None:
        config.check_learning_rate()


def check_named(config: TrainConfig) -> None:
    """Raise UsageError where an option that names something is missing, or names nothing that may be."""
    if not config.data:
        raise UsageError("--data is missing; give s3://bucket/prefix or a folder with one folder of images a class.")
    if config.resume and not config.name:
        raise UsageError("--resume needs --name; `raytrain runs` lists the runs.")
    if config.name:
        records.check_name(config.name)


def _continued(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """On another number of workers, a run goes on with the global batch and the learning rate that it began with."""
    for option in ("freeze", "head_learning_rate_factor"):
        now, then = getattr(config, option), getattr(before, option)
        if now != then:  # the optimizer's state is laid out by them
            flag = "--" + option.replace("_", "-")
            raise UsageError(f"{flag} is {now}, and the run was begun with {then}; go on with that, or begin another from its --weights.")
    return dataclasses.replace(
        config,
        batch_size=config.batch_size or before.batch_size,
        learning_rate=before.learning_rate if config.learning_rate is None else config.learning_rate,
        mean=config.mean or before.mean,
        std=config.std or before.std,
    )


def import_beside(module: str) -> threading.Thread:
    """Import ``module`` with Ray and torch, the slowest part of starting, while the cluster starts and the data is listed."""
    # No daemon: Python would stop it in the midst of an import, and then wait for ever for that import's lock.
    thread = threading.Thread(target=importlib.import_module, args=(module,), name="imports")
    thread.start()
    return thread


def _stop_in_cluster(name: str, address: str, reason: str) -> None:
    import ray

    from raytrain.backends.ray.coordinator import find_coordinator

    try:
        coordinator = find_coordinator(name)
    except ValueError:
        raise UsageError(f"No run called {name!r} is training in the cluster at {address}; `raytrain runs` lists the runs.") from None
    ray.get(coordinator.request_stop.remote(reason))
