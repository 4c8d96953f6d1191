"""`raytrain.ImageLoader` beside other readers: small images and photographs, from a folder and from a bucket.

Nothing is trained. Each reader gives batches to one process, and to two, that look at every byte, in float32 and
normalised, as a network wants them: raytrain.train and the loader from the same files; torchvision's ImageFolder with a
DataLoader from the folder; the loader and LitData each from its own packed files, which both keep on the disk; and
``ray.data`` from the bucket, as decoded. An epoch is measured as in ``ingest``. The rates of raytrain.train leave out
its start, while which it reads ahead; those of the others begin with their first batch.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tests.benchmarks.ingest import BATCH, NUM_WORKERS, Marks, marks_in, rates_of, read, read_as_documented, shown
from tests.benchmarks.packed import MEAN, pack_both, read_through_litdata
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.photographs import write_photographs

_EPOCHS = 3
_NUM_PHOTOGRAPHS = 2048


def measure(bench: Bench) -> Report:
    """Measure small images, and then photographs, each side in turn."""
    from raytrain.demo.s3_server import S3Server

    photographs = bench.scratch / "photographs of 100 KB"
    write_photographs(photographs, bench.scaled(_NUM_PHOTOGRAPHS, NUM_WORKERS * BATCH))
    figures: list[Figure] = []
    checks: list[Check] = []
    for kind, images, pixels in (("small images", bench.images, 32), ("photographs", photographs, 224)):
        served = bench.scratch / kind
        for bucket in ("raytrain", "litdata"):
            (served / bucket).mkdir(parents=True)
        shutil.copytree(images, served / "images")  # the server follows no link
        with S3Server(served) as server:
            on_server = dataclasses.replace(bench, environment=bench.environment | server.environment())
            on_server.alone(Side(pack_both, {"images": str(images)}))
            for num_workers in (1, NUM_WORKERS):
                results = on_server.alternate(_sides(str(images), pixels, num_workers), bench.scaled(3), shown)
                rates = {
                    name: [median(values) for values in zip(*map(rates_of, rounds), strict=True)]
                    for name, rounds in results.items()
                }
                what = f"{kind}, {num_workers} {'process' if num_workers == 1 else 'processes'}"
                figures += [Figure(f"{what}: {name}, epoch by epoch", "images/s", each) for name, each in rates.items()]
                checks += _checks(what, rates)
    return Report("reader: ImageLoader in 1 and 2 processes, beside others", figures, checks)


def _sides(images: str, pixels: int, num_workers: int) -> dict[str, Side]:
    given = {"epochs": _EPOCHS, "pixels": pixels, "num_workers": num_workers}
    sides = {
        f"{name}, {place}, {kept}": Side(function, {**given, "url": url, "cache": cache})
        for place, url in (("folder", images), ("bucket", "s3://images"))
        for kept, cache in (("streamed", "none"), ("cached", "memory"))
        for name, function in (("raytrain.train", read_through_run), ("ImageLoader", read_through_loader))
    }
    return sides | {
        "ImageFolder, folder": Side(read_through_torchvision, {**given, "images": images}),
        "ImageLoader, packed": Side(read_through_loader, {**given, "url": "s3://raytrain", "cache": "disk"}),
        "LitData, packed": Side(read_through_litdata, {**given, "normalised": True}),
        "ray.data, bucket": Side(read_as_documented, {**given, "url": "s3://images", "epochs": 2}),
    }


def _checks(kind: str, rates: dict[str, list[float]]) -> list[Check]:
    """Compare the loader with raytrain.train, and its first and later epochs with those of each peer."""
    checks = []
    for name, of_run in rates.items():
        if name.startswith("raytrain.train"):
            of_loader = rates[name.replace("raytrain.train", "ImageLoader")]
            checks.append(
                Check(f"{kind}: ImageLoader : {name}, later epochs", min(of_loader[1:]) / min(of_run[1:]), 0.95)
            )
    for peer, of_loader in (
        ("ImageFolder, folder", "ImageLoader, folder, streamed"),
        ("LitData, packed", "ImageLoader, packed"),
        ("ray.data, bucket", "ImageLoader, bucket, streamed"),
    ):
        ours, theirs = rates[of_loader], rates[peer]
        checks += [
            Check(f"{kind}: {of_loader} : {peer}, first epoch", ours[0] / theirs[0], at_least=1),
            Check(f"{kind}: {of_loader} : {peer}, later epochs", min(ours[1:]) / max(theirs[1:]), at_least=1),
        ]
    return checks


# raytrain.train, with a loop that only reads.


def read_through_run(
    url: str, cache: Literal["memory", "none"], epochs: int, pixels: int, num_workers: int, folder: str
) -> list[Marks]:
    from raytrain import TrainConfig
    from raytrain.launch.train import train

    options: dict[str, Any] = {
        "data": url,
        "validation_fraction": 0.01,
        "storage": folder,
        "name": "reader",
        "cache": cache,
    }
    options |= {"image_size": pixels, "mean": MEAN, "std": MEAN, "precision": "float32", "device": "cpu"}
    options |= {"batch_size": f"{BATCH}/worker", "workers": num_workers, "epochs": epochs, "backend": "local"}
    train(TrainConfig(**options), loop=partial(_read_run, folder=folder))
    return marks_in(folder)


def _read_run(run: Any, folder: str) -> None:
    run.steps.report_start()  # otherwise the driver would not read ahead before the first step
    batches = ((epoch.number, batch.images) for epoch in run.epochs(evaluate=dict) for batch in epoch)
    read(batches, run.rank, folder)


# The loader, and its peers, in two processes that torch.distributed joins.


def read_through_loader(
    url: str, cache: Literal["disk", "memory", "none"], epochs: int, pixels: int, num_workers: int, folder: str
) -> list[Marks]:
    run_in_processes(num_workers, _read_loader, url, cache, epochs, pixels, folder)
    return marks_in(folder)


def _read_loader(url: str, cache: str, epochs: int, pixels: int, folder: str) -> None:
    import torch.distributed as dist

    import raytrain

    options: dict[str, Any] = {"image_size": pixels, "mean": MEAN, "std": MEAN}
    options |= {"cache": cache, "cache_folder": str(Path(folder, "cache")), "epochs": epochs}
    loader = raytrain.ImageLoader(url, batch_size=BATCH * dist.get_world_size(), validation_fraction=0.01, **options)
    dist.barrier()
    read(((epoch, images) for epoch in range(epochs) for images, _ in loader), dist.get_rank(), folder)
    dist.barrier()
    loader.close()


def read_through_torchvision(images: str, epochs: int, pixels: int, num_workers: int, folder: str) -> list[Marks]:
    run_in_processes(num_workers, _read_image_folder, images, epochs, pixels, folder)
    return marks_in(folder)


def _read_image_folder(images: str, epochs: int, pixels: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.ToImage(), v2.Resize([pixels, pixels]), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, MEAN)]
    )
    dataset = ImageFolder(str(Path(images)), transform)
    sampler = DistributedSampler(dataset)
    processes = max((os.cpu_count() or 1) // dist.get_world_size(), 1)  # one for each core of the machine
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=processes, persistent_workers=True, drop_last=True)
    dist.barrier()
    read(_epochs_of(loader, sampler, epochs), dist.get_rank(), folder)


def _epochs_of(loader: Any, sampler: Any, epochs: int) -> Any:
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, _ in loader:
            yield epoch, images
