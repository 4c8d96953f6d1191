"""Reading images from a bucket that is far away: each answer takes 30 ms, one in twenty 400 ms, on a line of 1 Gbit/s.

The same readers as in ``ingest`` and ``packed``, of images of 1 KB, and of photographs of 100 KB that are
made here, which all readers shrink to 224x224 pixels.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.benchmarks.ingest import decode, fetch, rates_of, read_as_documented, read_through_raytrain, shown
from tests.benchmarks.packed import pack_both, read_through_litdata
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.photographs import write_photographs

_EPOCHS, _BUFFERED = 8, 2  # the first epochs are read ahead, while the workers start
_NUM_PHOTOGRAPHS = 5000  # at any scale: of fewer, all epochs would be read ahead
_LIMITS = ("GETs alone", "decoding alone")


def measure(bench: Bench) -> Report:
    small, large = bench.scratch / "small", bench.scratch / "large"
    shutil.copytree(bench.images, small / "images")
    write_photographs(large / "images", _NUM_PHOTOGRAPHS)
    figures: list[Figure] = []
    checks: list[Check] = []
    for served, size, pixels in ((small, "1 KB", 32), (large, "100 KB", 224)):
        of_size, checks_of_size = _measure(bench, served, size, pixels)
        figures += of_size
        checks += checks_of_size
    title = "line: 2 workers that read every byte; 30 ms to the first byte, 5 % with 400 ms, 1 Gbit/s"
    return Report(title, figures, checks)


def _measure(bench: Bench, served: Path, size: str, pixels: int) -> tuple[list[Figure], list[Check]]:
    from raytrain.demo.s3_server import S3Server
    from tests.helpers.slow_line import SlowLine

    for bucket in ("raytrain", "litdata"):
        (served / bucket).mkdir()
    with S3Server(served) as server:
        near = dataclasses.replace(bench, environment=bench.environment | server.environment())
        near.alone(Side(pack_both, {"images": str(served / "images")}))
        with SlowLine(urlsplit(server.endpoint_url).port or 80) as line:
            endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
            far = dataclasses.replace(near, environment=near.environment | endpoint)
            results = far.alternate(_sides(pixels), bench.scaled(2), shown)
    mean_bytes = np.mean([file.stat().st_size for file in (served / "images").rglob("*.jpg")])
    limit = Figure(f"{size}: what the line carries", "images/s", [line.line.bytes_per_s / float(mean_bytes)])
    rates = {
        name: [median(values) for values in zip(*map(rates_of, rounds), strict=True)]
        for name, rounds in results.items()
        if name not in _LIMITS
    }
    figures = [limit, *(Figure(f"{size}: {name} (2 processes)", "images/s", results[name]) for name in _LIMITS)]
    figures += [Figure(f"{size}: {name}, epoch by epoch", "images/s", each) for name, each in rates.items()]
    # The same cores do both.
    reachable = min(limit.median, 1 / sum(1 / each.median for each in figures[1:3]))
    ours, theirs, on_disk, cached, litdata = (
        _together(rates[name])
        for name in (
            "raytrain",
            "Ray's documented way",
            "raytrain, shards, cached on disk",
            "raytrain, shards, cached",
            "LitData, shards",
        )
    )
    first = rates["raytrain, shards"][0] / rates["LitData, shards"][0]
    return figures, [
        Check(f"{size}: raytrain : GETs and decoding alone, or the line", ours / reachable, at_least=0.7),
        Check(f"{size}: raytrain : Ray's way", ours / theirs, at_least=1),
        Check(f"{size}: raytrain : LitData, shards, first epoch", first, at_least=1),
        Check(f"{size}: raytrain : LitData, shards, on the disk of both", on_disk / litdata, at_least=0.4),
        Check(f"{size}: raytrain : LitData, shards, cached by both", cached / litdata, at_least=1),
    ]


def _together(rates: list[float]) -> float:
    """The images per second of all epochs that are not read ahead, or of the only one."""
    return harmonic_mean(rates[_BUFFERED:] or rates)


def _sides(pixels: int) -> dict[str, Side]:
    streamed: dict[str, Any] = {"cache": "none", "epochs": _EPOCHS, "pixels": pixels}
    return {
        "GETs alone": Side(fetch, {"url": "s3://images"}),
        "decoding alone": Side(decode, {"url": "s3://images", "pixels": pixels}),
        "Ray's documented way": Side(read_as_documented, {"url": "s3://images", "epochs": 1, "pixels": pixels}),
        "raytrain": Side(read_through_raytrain, {"url": "s3://images", **streamed}),
        "LitData, shards": Side(read_through_litdata, {"epochs": _EPOCHS, "pixels": pixels}),
        "raytrain, shards": Side(read_through_raytrain, {"url": "s3://raytrain", **streamed}),
        "raytrain, shards, cached on disk": Side(
            read_through_raytrain, {"url": "s3://raytrain", **streamed, "cache": "disk"}
        ),
        "raytrain, shards, cached": Side(
            read_through_raytrain, {"url": "s3://raytrain", **streamed, "cache": "memory"}
        ),
    }
