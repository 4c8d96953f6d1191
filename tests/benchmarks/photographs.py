"""Packed photographs of 100 KB in later epochs, cached on the disk by both: raytrain and LitData at 224x224 pixels.

All of an image is shrunk, or a random part of it (torchvision's RandomResizedCrop). The CPU is that of all processes
from the end of one epoch to the end of a later one, for the images that were read meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any, Literal

from tests.benchmarks.ingest import Marks, read_through_raytrain
from tests.benchmarks.packed import pack_both, read_through_litdata
from tests.benchmarks.process_tree import cpu_until_end
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.photographs import write_photographs

_NUM_PHOTOGRAPHS = 2048  # whole batches for each worker: LitData drops the rest
_EPOCHS, _FIRST, _LAST = 12, 3, 10  # what is read ahead is as much at the end of the last one as of the first
_PIXELS = 224
_READERS = {"raytrain": read_through_raytrain, "LitData": read_through_litdata}
_QUANTITIES = {"cpu": "s of a core for 1,000 images", "rate": "images/s"}


def measure(bench: Bench) -> Report:
    """Measure each side three times, in turn."""
    from raytrain.demo.s3_server import S3Server

    served = bench.scratch / "photographs"
    write_photographs(bench.scratch / "photographs of 100 KB", _NUM_PHOTOGRAPHS)
    for bucket in ("raytrain", "litdata"):
        (served / bucket).mkdir(parents=True)
    with S3Server(served) as server:
        bench = dataclasses.replace(bench, environment=bench.environment | server.environment())
        bench.alone(Side(pack_both, {"images": str(bench.scratch / "photographs of 100 KB")}))
        results = bench.alternate(_sides(), bench.scaled(3), "{0[cpu]:.3f} s, {0[rate]:,.0f} images/s".format)
    figures = {
        (name, quantity): Figure(name, unit, [each[quantity] for each in values])
        for name, values in results.items()
        for quantity, unit in _QUANTITIES.items()
    }
    return Report("photographs: 2 workers, later epochs", list(figures.values()), _checks(figures))


def _checks(figures: dict[tuple[str, str], Figure]) -> list[Check]:
    limits: dict[str, dict[str, Any]] = {"cpu": {"at_most": 1.0}, "rate": {"at_least": 1.0}}
    return [
        Check(
            f"{name} : LitData, {quantity}",
            figure.median / figures[f"LitData, {name.rpartition(', ')[2]}", quantity].median,
            **limits[quantity],
        )
        for (name, quantity), figure in figures.items()
        if name.startswith("raytrain")
    ]


def _sides() -> dict[str, Side]:
    shards = {"url": "s3://raytrain", "cache": "disk"}
    readers: dict[str, tuple[str, dict[str, Any]]] = {
        "LitData": ("LitData", {}),
        "raytrain, --backend local": ("raytrain", {**shards, "backend": "local"}),
        "raytrain on Ray": ("raytrain", {**shards, "backend": "ray"}),
    }
    return {
        f"{name}, {part}": Side(later_epochs, {"reader": reader, "arguments": {**arguments, "crop": crop}})
        for part, crop in (("stretched", False), ("random crops", True))
        for name, (reader, arguments) in readers.items()
    }


def later_epochs(reader: Literal["raytrain", "LitData"], arguments: dict[str, Any], folder: str) -> dict[str, float]:
    """Read all epochs in a process tree of its own; seconds of a core for 1,000 images, and images a second."""
    function, result = _READERS[reader], Path(folder, "result")
    given = json.dumps({**arguments, "epochs": _EPOCHS, "pixels": _PIXELS, "folder": folder})
    command = [sys.executable, "-m", "tests.benchmarks.alone", f"{function.__module__}:{function.__qualname__}", given]
    own_server = {"PYTHONHASHSEED": str(int(time.time()))}  # a fork server of another side is not in the tree
    looks = cpu_until_end(subprocess.Popen([*command, str(result)], env={**os.environ, **own_server}))
    workers: list[Marks] = json.loads(result.read_text())
    first, last = (max(at for marks in workers for of, at, _ in marks if of == epoch) for epoch in (_FIRST, _LAST))
    num_images = sum(size for marks in workers for of, _, size in marks if _FIRST < of <= _LAST)
    used = looks[bisect_left(looks, (last, 0.0))][1] - looks[bisect_left(looks, (first, 0.0))][1]
    return {"cpu": 1000 * used / num_images, "rate": num_images / (last - first)}
