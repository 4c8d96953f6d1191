"""Train, evaluate and predict on images of which some kill the process that decodes them; print the results as JSON.

``python -m tests.helpers.deadly_images IMAGES STORAGE BACKEND``, with ``deadly_decoder`` in PYTHONPATH.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray

import raytrain
from raytrain.runs.documents import SKIPPED
from tests.helpers.small_runs import config

OPTIONS = {"batch_size": 200, "epochs": 2, "mean": None, "std": None}  # these are measured
NUM_IMAGES = 5001  # more than are read at the start of a run


def make_images(folder: Path, deadly: list[str]) -> Path:
    """Write 12x12 JPEGs into three class folders; those at ``deadly`` have a text each that makes them so."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (folder / name).mkdir(parents=True)
        for number in range(NUM_IMAGES // 3):
            pixels = random.integers(0, 180, (12, 12, 3), dtype=np.uint8)
            pixels[:, :, channel] += 75
            path = folder / name / f"{number:04d}.jpg"
            kind = ("segfault", "exit")[number % 2]
            comment = f"deadly:{kind}" if f"{name}/{path.name}" in deadly else ""
            Image.fromarray(pixels).save(path, comment=comment.encode())
    return folder


def main(images: str, storage: str, backend: str) -> None:
    if backend == "ray":
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    results: dict[str, Any] = {}
    for cache in ("none", "memory"):
        options = config(images, storage, backend=backend, name=cache, cache=cache, trace=True, **OPTIONS)
        result = raytrain.train(options)
        skipped = (Path(storage) / cache / SKIPPED).read_text().splitlines()
        results[cache] = {**result.summary(), "skipped": sorted(json.loads(line)["key"] for line in skipped)}
    trained: Any = {"storage": storage, "trust": True}
    results["evaluate"] = raytrain.evaluate("memory", images, **trained).summary()
    results["predict"] = raytrain.predict("memory", images, f"{storage}/predictions.parquet", **trained).summary()
    ray.shutdown()
    # Not before: Ray prints its complaints to standard output, too.
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
