"""What a block costs the processes that are not its worker's, on clusters of several nodes whose tasks read nothing.

All nodes are on this machine, so that wall-clock time says little: from the CPU time of a block follows how many they
could start in a second if each had a core of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psutil

from raytrain.data.blocks import Block, to_table
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.storage.open import open_store
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_NODES = 1, 4, 16
_STREAMED, _CACHED = "through Ray Data", "by the cache's plain tasks"
_WORKERS_PER_NODE = 4
_SHAPE = ImageShape(224, 224, 3)
_GOAL = 431  # blocks/s: 64 GPUs, each of which uses 3,000 images/s of 224x224 pixels, in blocks of 445
_WARM_UP, _BLOCKS = 512, 2048  # Ray Data plans 1,024 blocks at a time, so these are two such executions
_STORE_BYTES = 600 << 20  # the cache's blocks stay
_COSTS = {
    "feeders": "ms of a core a block, beside their idle time",
    "feeders idle": "cores",
    "driver": "ms of a core a block, beside its idle time",
    "driver idle": "cores",
    "coordinator": "ms of a core a block, beside its idle time",
    "coordinator idle": "cores",
    "Ray's head": "ms of a core a block, beside its idle time",
    "Ray's head idle": "cores",
    "blocks/s": "in this run",
}
_LEAST_MS = 0.01  # CPU time is counted in ticks of 10 ms, so that a cost may come out as nothing, or less
_SETTLES_S, _IDLE_S = 5.0, 10.0


def measure(bench: Bench) -> Report:
    """Measure both ways on each number of nodes."""
    options = {"images": str(bench.images), "blocks": bench.scaled(_BLOCKS, least=256)}
    sides = {
        f"{way}, nodes: {nodes}": Side(feed, {**options, "nodes": nodes, "streamed": way == _STREAMED})
        for way in (_STREAMED, _CACHED)
        for nodes in _NODES
    }
    text = "feeders {0[feeders]:.2f} ms a block, driver {0[driver]:.2f}, coordinator {0[coordinator]:.2f}".format
    results = bench.alternate(sides, bench.scaled(2), text)
    figures = {
        (name, cost): Figure(f"{name}: {cost}", unit, [each[cost] for each in values])
        for name, values in results.items()
        for cost, unit in _COSTS.items()
    }
    checks = [
        Check(
            f"{name}, blocks/s of the {cores:g} {process}, each with a core of its own", most, at_least=_GOAL, unit=""
        )
        for name in sides
        for process in ("feeders", "driver", "coordinator", "Ray's head")
        for cores in [results[name][0][f"number of {process}"]]
        for cost_ms in [max(figures[name, process].median, _LEAST_MS)]
        for most in [1000 * (cores - figures[name, f"{process} idle"].median) / cost_ms]
        if cores
    ]
    return Report("feed: CPU time of a block that is read at once, for 64 workers", list(figures.values()), checks)


def feed(images: str, nodes: int, blocks: int, folder: str, *, streamed: bool) -> dict[str, float]:
    """Feed 64 workers that drop their blocks; returns what a block and idle time cost, as ``_COSTS`` says."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    from raytrain.launch.ray.coordinator import start_coordinator
    from raytrain.launch.ray.feed import block_cache, ingest, streaming
    from raytrain.launch.ray.serve_credentials import lend_credentials

    ingest.read_block = block_cache.read_block = at_once
    with _cluster(nodes), ExitStack() as opened:
        store = open_store(images)
        manifest = build_manifest(store)
        num_workers = _WORKERS_PER_NODE * nodes
        total = _WARM_UP + blocks + 2 * num_workers
        samples = total * 445
        plan = BatchPlan(samples, num_workers * 445, 1, seed=0)
        partitions = [Partition(plan, rank, (1.0,) * num_workers) for rank in range(num_workers)]
        known = {"num_steps": plan.num_steps, "steps_per_epoch": plan.steps_per_epoch}
        coordinator = start_coordinator("run", open_store(folder), num_workers=num_workers, **known)
        credentials, _ = lend_credentials(coordinator, [store])
        image_set = ingest.ImageSet(
            store.with_lent_credentials(credentials),
            ImageFormat(_SHAPE),
            ray.put(manifest),
            manifest.rows_per_block(_SHAPE),
            coordinator,
        )
        cpus = ingest.DataCpus(nodes, 1)
        workers = ray.remote(Workers).options(num_cpus=0, max_concurrency=2).remote(coordinator)
        feeders: tuple[Any, ...] = ()
        if streamed:
            feeders = streaming.start_feeders(num_workers, cpus)
            opened.callback(streaming.stop_feeders, feeders)
            ray.get([feeder.__ray_call__.remote(_read_at_once) for feeder in feeders])
            workers.take_stream.remote(feeders, image_set, partitions)
        else:
            order = CacheOrder(plan, 0, image_set.rows_per_block)
            filler = block_cache.CacheFiller(coordinator, cpus, {"train": image_set}, {"train": order})
            opened.callback(filler.close)
            filler.start()
            workers.take_cached.remote(total)
        pids: dict[str, list[int]] = {
            "feeders": ray.get([feeder.__ray_call__.remote(_pid) for feeder in feeders]),
            "driver": [os.getpid()],
            "coordinator": [ray.get(coordinator.__ray_call__.remote(_pid))],  # pyright: ignore
            "Ray's head": [each.pid for each in psutil.Process().children() if each.name() == "gcs_server"],
        }
        ray.get(workers.received.remote(_WARM_UP))
        before = _used(pids)
        received: Any = ray.get(workers.received.remote(_WARM_UP + blocks))
        after = _used(pids)
        ray.get(workers.pause.remote())
        time.sleep(_SETTLES_S)  # until all buffers are full
        idle = _used(pids)
        time.sleep(_IDLE_S)  # what is measured is the use of so many seconds without work
        still = _used(pids)
    number, seconds = received - _WARM_UP, after["clock"] - before["clock"]
    costs: dict[str, float] = {"blocks/s": number / seconds}
    for name in pids:
        costs[f"number of {name}"] = len(pids[name])
        costs[f"{name} idle"] = resting = (still[name] - idle[name]) / (still["clock"] - idle["clock"])
        costs[name] = 1000 * (after[name] - before[name] - resting * seconds) / number
    return costs


class Workers:
    """All workers in one process: as each of them does, a thread takes its blocks, brings them here and drops them."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._changed = threading.Condition()
        self._number = 0
        self._is_paused = False

    def take_stream(self, feeders: Any, images: Any, partitions: list[Partition]) -> None:
        from raytrain.launch.ray.feed.streaming import Stream, stream_blocks

        for partition in partitions:
            self._take(stream_blocks(feeders, Stream(0, 0, "train", 0, len(partitions)), images, partition))

    def take_cached(self, total: int) -> None:
        from raytrain.launch.ray.feed.block_cache import RemoteBlocks

        self._take(map(RemoteBlocks(self._coordinator, "train", _SHAPE), range(total)))

    def received(self, number: int) -> int:
        """Wait until ``number`` blocks are here; returns how many are."""
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)
            return self._number

    def pause(self) -> None:
        """Take no more blocks."""
        self._is_paused = True

    def _take(self, blocks: Iterator[Any]) -> None:
        threading.Thread(target=self._count, args=(blocks,), daemon=True).start()

    def _count(self, blocks: Iterator[Any]) -> None:
        for _ in blocks:
            with self._changed:
                self._number += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_paused)


def at_once(*_: object, **__: object) -> Any:
    """A block of one black image, which is large enough for the object store."""
    return to_table(Block(np.zeros((1, 224, 224, 3), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)))


@contextmanager
def _cluster(nodes: int) -> Iterator[None]:
    """Be connected to a cluster with this many nodes of one CPU, beside a head that has none."""
    from ray.cluster_utils import Cluster

    from raytrain.launch.ray.connection import Connection

    store: dict[str, Any] = {"object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**store, "num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, **store)
        with Connection(cluster.address) as connection:
            connection.connect()
            yield
    finally:
        cluster.shutdown()


def _pid(_: object) -> int:
    return os.getpid()


def _read_at_once(_: object) -> None:
    """In a feeder, whose tasks shall read nothing."""
    from raytrain.launch.ray.feed import ingest, streaming

    ingest.read_block = streaming.read_block = at_once


def _used(pids: dict[str, list[int]]) -> dict[str, float]:
    """Seconds of a core that processes have used, by kind, and the time."""
    times = {kind: [psutil.Process(pid).cpu_times() for pid in each] for kind, each in pids.items()}
    return {kind: sum(each.user + each.system for each in used) for kind, used in times.items()} | {
        "clock": time.monotonic()
    }
