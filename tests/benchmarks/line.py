"""Reading images from a bucket that is far away: each answer takes 30 ms, one in twenty 400 ms, on a line of 1 Gbit/s.

The same readers as in ``ingest`` and ``packed``, of images of 1 KB, and of photographs of 100 KB that are made here.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from statistics import harmonic_mean, median
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from tests.benchmarks.ingest import fetch, rates_of, read_as_documented, read_through_raytrain, shown
from tests.benchmarks.packed import pack_both, read_through_litdata
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_EPOCHS, _BUFFERED = 8, 2  # the first epochs are read ahead, while the workers start
_NUM_PHOTOGRAPHS = 5000  # at any scale: of fewer, all epochs would be read ahead
_SIDES = {
    "GETs alone": Side(fetch, {"url": "s3://images"}),
    "Ray's documented way": Side(read_as_documented, {"url": "s3://images", "epochs": 1}),
    "raytrain": Side(read_through_raytrain, {"url": "s3://images", "cache": "none", "epochs": _EPOCHS}),
    "LitData, shards": Side(read_through_litdata, {"epochs": _EPOCHS}),
    "raytrain, shards": Side(read_through_raytrain, {"url": "s3://raytrain", "cache": "none", "epochs": _EPOCHS}),
}


def measure(bench: Bench) -> Report:
    small, large = bench.scratch / "small", bench.scratch / "large"
    shutil.copytree(bench.images, small / "images")
    draw_photographs(large / "images", _NUM_PHOTOGRAPHS)
    figures: list[Figure] = []
    checks: list[Check] = []
    for served, size in ((small, "1 KB"), (large, "100 KB")):
        of_size, checks_of_size = _measure(bench, served, size)
        figures += of_size
        checks += checks_of_size
    title = "line: 2 workers that sum what they read; 30 ms to the first byte, 5 % with 400 ms, 1 Gbit/s"
    return Report(title, figures, checks)


def _measure(bench: Bench, served: Path, size: str) -> tuple[list[Figure], list[Check]]:
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
            results = far.alternate(_SIDES, bench.scaled(2), shown)
    mean_bytes = np.mean([file.stat().st_size for file in (served / "images").rglob("*.jpg")])
    limit = Figure(f"{size}: what the line carries", "images/s", [line.line.bytes_per_s / float(mean_bytes)])
    rates = {
        name: [median(values) for values in zip(*map(rates_of, rounds), strict=True)]
        for name, rounds in results.items()
        if name != "GETs alone"
    }
    figures = [limit, Figure(f"{size}: GETs alone (2 processes)", "images/s", results["GETs alone"])]
    figures += [Figure(f"{size}: {name}, epoch by epoch", "images/s", each) for name, each in rates.items()]
    reachable = min(limit.median, figures[1].median)
    ours, theirs, packed, litdata = (
        _together(rates[name]) for name in ("raytrain", "Ray's documented way", "raytrain, shards", "LitData, shards")
    )
    return figures, [
        Check(f"{size}: raytrain : GETs alone, or the line", ours / reachable, at_least=0.7),
        Check(f"{size}: raytrain : Ray's way", ours / theirs, at_least=1),
        Check(f"{size}: raytrain : LitData, shards", packed / litdata, at_least=1),
    ]


def _together(rates: list[float]) -> float:
    """The images per second of all epochs that are not read ahead, or of the only one."""
    return harmonic_mean(rates[_BUFFERED:] or rates)


def draw_photographs(folder: Path, num: int) -> None:
    """Write ``num`` JPEGs of 500×375 and some 100 KB below ``folder``, in ten class folders."""
    random = np.random.default_rng(0)
    for number in range(num):
        coarse = Image.fromarray(random.integers(0, 256, (94, 125, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        file = folder / f"{number % 10}" / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse.save(file, quality=93)
