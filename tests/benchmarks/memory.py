"""Peak memory of the driver and the workers while images are streamed, for growing data sets: it must stay constant.

The memory of a process is its resident size without shared memory (libraries, the object store).
"""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_EVERY_S = 0.1
_GROWTH = {"1×": 0.25, "4×": 1.0, "16×": 4.0}
"""Size of the data set, as a fraction of the existing images."""


def measure(bench: Bench) -> Report:
    sides = {name: Side(stream, {"url": bench.url, "growth": growth}) for name, growth in _GROWTH.items()}
    results = bench.alternate(sides, bench.scaled(1), _shown)
    figures, checks = [], []
    for who in ("driver", "worker"):
        by_size = {name: [max(each[who]) / 1e6 for each in rounds] for name, rounds in results.items()}
        figures += [
            Figure(f"{who}, {name}: {results[name][0]['num_images']:,} images", "MB", each)
            for name, each in by_size.items()
        ]
        ratio = median(by_size["16×"]) / median(by_size["1×"])
        checks.append(Check(f"{who}, 16× : 1×", ratio, at_most=1.1))
    return Report("memory: peak private memory of a process while it streams an epoch", figures, checks)


def _shown(peaks: dict[str, Any]) -> str:
    return f"driver {max(peaks['driver']) / 1e6:.0f} MB, worker {max(peaks['worker']) / 1e6:.0f} MB"


def stream(url: str, growth: float, folder: str) -> dict[str, Any]:
    """Return the peak memory in bytes of the driver and of each worker in a run that only reads."""
    from raytrain.recipes import cifar10
    from tests.benchmarks.subset import train_on

    options: dict[str, Any] = {
        "data": url,
        "validation_fraction": 0.001,
        "storage": folder,
        "name": "memory",
        "cache": "none",
        "epochs": 1,
    }
    config = cifar10(**options, workers=2, device="cpu")
    with Peak() as driver:
        train_on(config, partial(_grown, growth=growth), partial(read, folder=folder))
    workers = [json.loads(path.read_text()) for path in Path(folder).glob("worker-*.json")]
    return {
        "driver": [driver.num_bytes],
        "worker": [worker["num_bytes"] for worker in workers],
        "num_images": sum(worker["num_images"] for worker in workers),
    }


def _grown(num_images: int, growth: float) -> Any:
    """Return indices into a manifest of ``num_images``: a part of it, or each several times."""
    return np.arange(int(num_images * growth)) % num_images


def read(run: Any, folder: str) -> None:
    run.reporter.note_start(run.world_size, 0)
    with Peak() as peak:
        num_images = sum(len(local_batch.labels) for local_batch in run.batches.source.train(0))
    Path(folder, f"worker-{run.rank}.json").write_text(
        json.dumps({"num_bytes": peak.num_bytes, "num_images": num_images})
    )


class Peak:
    """The peak private memory of this process during the ``with`` block."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        process: Any = psutil.Process()
        while True:
            memory = process.memory_info()
            self.num_bytes = max(self.num_bytes, memory.rss - memory.shared)
            if self._ended.wait(_EVERY_S):
                return
