"""The time and memory that the batch plan needs for any step, with 10⁹ samples and 1,024 workers."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import Partition, WorkerOrder
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

NUM_SAMPLES, NUM_WORKERS, SAMPLES_A_STEP = 10**9, 1024, 1000
_CALLS = 200


def measure(bench: Bench) -> Report:
    rounds = bench.alternate({"plan": Side(look_up, {})}, bench.scaled(3), _shown)["plan"]
    local_batch_ms, block_ms = ([each[name] for each in rounds] for name in ("local_batch_ms", "block_ms"))
    peak_mb = [each["peak_bytes"] / 1e6 for each in rounds]
    return Report(
        "plan: 10⁹ samples, 1,024 workers, any step of any worker",
        [
            Figure("a worker's local batch of 1,000 samples", "ms", local_batch_ms),
            Figure("1,000 samples of a worker's stream", "ms", block_ms),
            Figure("peak memory", "MB", peak_mb),
        ],
        [
            Check("1,000 samples of a local batch", median(local_batch_ms), at_most=1, unit="ms"),
            Check("1,000 samples of a stream", median(block_ms), at_most=1, unit="ms"),
            Check("peak memory (an array of all samples: 8,000 MB)", max(peak_mb), at_most=1, unit="MB"),
        ],
    )


def _shown(costs: dict[str, Any]) -> str:
    return f"{costs['local_batch_ms']:.2f} ms for a local batch, {costs['block_ms']:.2f} ms for a stream"


def look_up() -> dict[str, Any]:
    """Measure the time and memory of random look-ups; memory in a separate pass, because tracing it takes time."""
    plan = BatchPlan(NUM_SAMPLES, NUM_WORKERS * SAMPLES_A_STEP, epochs=100, seed=0)
    loads = (1.0,) * NUM_WORKERS
    random = np.random.default_rng(0)
    steps, ranks = random.integers(0, plan.num_steps, _CALLS).tolist(), random.integers(0, NUM_WORKERS, _CALLS).tolist()

    def local_batch(call: int) -> int:
        return len(Partition(plan, ranks[call], loads).local_draws(plan.batch(steps[call])))

    def block(call: int) -> int:
        return len(WorkerOrder(Partition(plan, ranks[call], loads), steps[call], SAMPLES_A_STEP).draws(1))

    return {
        "local_batch_ms": _time_ms(local_batch),
        "block_ms": _time_ms(block),
        "peak_bytes": _peak_bytes(local_batch, block),
    }


def _time_ms(look_up: Callable[[int], int]) -> float:
    """Return the median milliseconds for 1,000 samples."""
    times = []
    for call in range(_CALLS):
        start = time.perf_counter()
        num_samples = look_up(call)
        times.append((time.perf_counter() - start) * 1e3 * 1000 / max(num_samples, 1))
    return median(times)


def _peak_bytes(*look_ups: Callable[[int], int]) -> int:
    tracemalloc.start()
    for call in range(_CALLS):
        for look_up in look_ups:
            look_up(call)
    return tracemalloc.get_traced_memory()[1]
