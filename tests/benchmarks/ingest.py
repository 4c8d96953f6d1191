"""Reading images, without training: two workers read every byte, with raytrain and in the way that Ray documents.

The upper limits are measured too: downloading alone and decoding alone. A worker notes the time of each batch. An epoch
starts with the last batch of the previous one, so that pauses between epochs count.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

NUM_WORKERS, BATCH, FETCHED_AT_ONCE, DECODED = 2, 256, 512, 8192

Marks = list[tuple[int, float, int]]
"""The batches of one worker: epoch, time of arrival, number of images. The first entry is the start of the loop."""


def measure(bench: Bench) -> Report:
    url = bench.url
    sides = {
        "GETs alone": Side(fetch, {"url": url}),
        "decoding alone": Side(decode, {"url": url}),
        "Ray's documented way": Side(read_as_documented, {"url": url, "epochs": 2}),
        "streaming": Side(read_through_raytrain, {"url": url, "cache": "none", "epochs": 3}),
        "cached": Side(read_through_raytrain, {"url": url, "cache": "memory", "epochs": 4}),
    }
    results = bench.alternate(sides, bench.scaled(2), shown)
    limits = [
        Figure(f"{name} (2 processes)", "images/s", results.pop(name)) for name in ("GETs alone", "decoding alone")
    ]
    rates = {
        name: [median(values) for values in zip(*map(rates_of, rounds), strict=True)]
        for name, rounds in results.items()
    }
    waits = {
        name: [median(values) for values in zip(*map(_waits, rounds), strict=True)] for name, rounds in results.items()
    }
    pauses = {
        name: [median(values) for values in zip(*map(_pauses, rounds), strict=True)] for name, rounds in results.items()
    }
    figures = [Figure(f"{name}, epoch by epoch", "images/s", each) for name, each in rates.items()]
    figures += [Figure(f"{name}, wait for the first batch of an epoch", "s", each) for name, each in pauses.items()]
    figures += [Figure(f"{name}, longest wait within an epoch", "s", each) for name, each in waits.items()]
    return Report(
        "ingest: 2 workers that read every byte",
        [*limits, *figures],
        _checks(rates, pauses, waits, limits[0].median),
    )


def _checks(
    rates: dict[str, list[float]], pauses: dict[str, list[float]], waits: dict[str, list[float]], gets: float
) -> list[Check]:
    documented = rates["Ray's documented way"]
    first, later = rates["streaming"][0] / documented[0], min(rates["streaming"][1:]) / max(documented[1:])
    return [
        Check("streaming, first epoch : Ray's way, first epoch", first, at_least=4),
        Check("streaming, slowest later epoch : Ray's way, fastest later epoch", later, at_least=4),
        Check("streaming : GETs alone", median(rates["streaming"]) / gets, at_least=0.7),
        Check(
            "cached, slowest epoch from the second : Ray's way, fastest",
            min(rates["cached"][1:]) / max(documented),
            at_least=40,
        ),
        Check(
            "streaming, pause before a later epoch : longest wait within one",
            max(pauses["streaming"][1:]) / max(waits["streaming"]),
            at_most=1,
        ),
        Check(
            "cached, pause before a later epoch : longest wait within one",
            max(pauses["cached"][1:]) / max(waits["cached"]),
            at_most=1,
        ),
    ]


def shown(result: Any) -> str:
    """Format a rate in images/s, or the rates of all epochs."""
    rates = rates_of(result) if isinstance(result, list) else [result]
    return ", ".join(f"{rate:,.0f}" for rate in rates) + " images/s"


def rates_of(workers: list[Marks]) -> list[float]:
    """Return the images per second of each epoch, over all workers."""
    ends = [min(marks[0][1] for marks in workers)]
    rates = []
    for epoch in range(workers[0][-1][0] + 1):
        ends.append(max(at for marks in workers for of, at, _ in marks if of == epoch))
        rates.append(sum(size for marks in workers for of, _, size in marks if of == epoch) / (ends[-1] - ends[-2]))
    return rates


def _pauses(workers: list[Marks]) -> list[float]:
    """Return the seconds of the slowest worker between the previous batch, or the loop's start, and each epoch."""
    pauses: dict[int, float] = {}
    for marks in workers:
        epochs = [-1, *(epoch for epoch, _, _ in marks[1:])]
        for before, after, earlier, later in zip(marks, marks[1:], epochs, epochs[1:], strict=False):
            if later != earlier:
                pauses[later] = max(pauses.get(later, 0.0), after[1] - before[1])
    return [pauses[epoch] for epoch in sorted(pauses)]


def _waits(workers: list[Marks]) -> list[float]:
    """Return the longest time between two batches of each epoch after the first, over all workers."""
    waits: dict[int, float] = {}
    for marks in workers:
        for before, after in pairwise(marks[1:]):
            if before[0] == after[0] > 0:
                waits[after[0]] = max(waits.get(after[0], 0.0), after[1] - before[1])
    return [waits[epoch] for epoch in sorted(waits)]


def read(batches: Iterable[tuple[int, Any]], rank: int, folder: str) -> None:
    """Read every byte of every batch, and note its time of arrival."""
    marks: Marks = [(0, time.time(), 0)]
    for epoch, images in batches:
        marks.append((epoch, time.time(), len(images)))
        images.max()  # without a copy, which a sum of uint8 would be
    Path(folder, f"marks-{rank}.json").write_text(json.dumps(marks))


def marks_in(folder: str) -> list[Marks]:
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("marks-*.json"))]


# raytrain, with a loop that only reads.


def read_through_raytrain(
    url: str,
    cache: Literal["memory", "disk", "none"],
    epochs: int,
    folder: str,
    pixels: int = 32,
    crop: bool = False,
    backend: Literal["local", "ray"] = "ray",
) -> list[Marks]:
    from raytrain.launch.train import train
    from raytrain.recipes import cifar10

    options: dict[str, Any] = {"data": url, "validation_fraction": 0.001, "storage": folder, "name": "ingest"}
    options |= {"image_size": (pixels, pixels), "cache_folder": str(Path(folder, "cache"))}
    options |= {"backend": backend, "random_resized_crop": crop, "batch_size": f"{BATCH}/worker"}
    train(
        cifar10(**options, workers=NUM_WORKERS, device="cpu", cache=cache, epochs=epochs),
        loop=partial(read_local_batches, folder=folder),
    )
    return marks_in(folder)


def read_local_batches(run: Any, folder: str) -> None:
    import torch

    from raytrain.data.prefetch import Prefetch
    from raytrain.training.steps import LoopPhase

    run.reporter.note_start(run.world_size, 0)  # The driver waits for this before it fills the cache.
    local_batches = Prefetch(run.batches.source.train(0), run.config.prefetch)
    arrays = ((each.batch.epoch, np.require(each.images, requirements=["C", "W"])) for each in local_batches)
    read(((epoch, torch.from_numpy(images)) for epoch, images in arrays), run.rank, folder)
    run.steps.phase = LoopPhase.OVER  # otherwise a loop without a step is an error


# Ray's documented way: a reader that shuffles the files each epoch, a map over its rows, a shard for each worker.


def read_as_documented(
    url: str, epochs: int, folder: str, pixels: int = 32, num_workers: int = NUM_WORKERS
) -> list[Marks]:
    import ray
    from pyarrow.fs import FileSelector, S3FileSystem
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # One CPU more for each worker, so that Ray Data can use all CPUs of the machine.
    ray.init(num_cpus=(os.cpu_count() or 1) + num_workers, include_dashboard=False)
    bucket = url.removeprefix("s3://")
    filesystem = S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], region=os.environ["AWS_REGION"])
    classes = sorted(each.base_name for each in filesystem.get_file_info(FileSelector(bucket)))

    def label(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": row["image"], "label": classes.index(row["path"].split("/")[-2])}

    options: dict[str, Any] = {"include_paths": True, "mode": "RGB", "size": (pixels, pixels), "shuffle": "files"}
    images = ray.data.read_images(bucket, filesystem=filesystem, **options).map(label)
    TorchTrainer(
        read_shard,
        train_loop_config={"epochs": epochs, "folder": folder},
        datasets={"train": images},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    return marks_in(folder)


def read_shard(config: dict[str, Any]) -> None:
    import ray.train

    shard: Any = ray.train.get_dataset_shard("train")
    epochs = range(config["epochs"])
    batches = ((epoch, batch["image"]) for epoch in epochs for batch in shard.iter_torch_batches(batch_size=BATCH))
    read(batches, ray.train.get_context().get_world_rank(), config["folder"])


# The limits: two processes that only download or only decode.


def fetch(url: str) -> float:
    keys = _shuffled_keys(url)
    return _together(fetch_here, [keys[rank::NUM_WORKERS] for rank in range(NUM_WORKERS)], url)


def fetch_here(keys: list[list[str]], url: str) -> tuple[float, float, int]:
    import torch.distributed as dist

    from raytrain.storage.open import open_store

    store, mine = open_store(url), keys[dist.get_rank()]
    dist.barrier()
    began_at = time.time()
    for start in range(0, len(mine), FETCHED_AT_ONCE):
        store.get_many(mine[start : start + FETCHED_AT_ONCE])
    return began_at, time.time(), len(mine)


def decode(url: str, pixels: int = 32) -> float:
    from raytrain.storage.open import open_store

    files = open_store(url).get_many(_shuffled_keys(url)[:DECODED])
    return _together(decode_here, files, pixels)


def decode_here(files: list[bytes], pixels: int) -> tuple[float, float, int]:
    import torch.distributed as dist

    from raytrain.data.images import decode as decoding

    shape = decoding.ImageShape(pixels, pixels, 3)
    decoding.decode(files[0], shape)  # The first call does the imports.
    dist.barrier()
    began_at = time.time()
    for file in files:
        decoding.decode(file, shape)
    return began_at, time.time(), len(files)


def _shuffled_keys(url: str) -> list[str]:
    from raytrain.data.labels.folders import build_manifest
    from raytrain.storage.open import open_store

    keys = build_manifest(open_store(url)).keys.to_pylist()
    return [keys[place] for place in np.random.default_rng(0).permutation(len(keys))]


def _together(function: Any, *arguments: Any) -> float:
    """Return the images per second that ``function`` processes in two processes together."""
    from tests.helpers.gloo_processes import run_in_processes

    began_at, ended_at, counts = zip(*run_in_processes(NUM_WORKERS, function, *arguments), strict=True)
    return sum(counts) / (max(ended_at) - min(began_at))
