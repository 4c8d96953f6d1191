"""Reading packed shards, without training: two workers read every byte, with raytrain and with LitData.

Both read the same JPEGs from one S3 server, each in its own format. LitData is used as its documentation says, except
for smaller chunks: a DataLoader with persistent workers, and a disk cache that is empty at first and serves the later
epochs. raytrain reads every epoch from S3. An epoch is measured as in ``ingest``: LitData's first epoch includes the
start of its processes, while raytrain prefetches before the loop is entered.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.ingest import BATCH, NUM_WORKERS, Marks, marks_in, rates_of, read, read_through_raytrain, shown
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.helpers.gloo_processes import run_in_processes

MEAN = (0.5, 0.5, 0.5)
_EPOCHS = 6
_CHUNK_BYTES = "1MB"
"""The size of raytrain's shards. With 10,000 of these images LitData was 2.4 times slower with chunks of 4 MB, and 6.7
times slower with its default of 64 MB."""


def measure(bench: Bench) -> Report:
    from raytrain.demo.s3_server import S3Server

    served = bench.scratch / "packed"
    for bucket in ("raytrain", "litdata"):
        (served / bucket).mkdir(parents=True)
    with S3Server(served) as server:
        bench = dataclasses.replace(bench, environment=bench.environment | server.environment())
        bench.alone(Side(pack_both, {"images": str(bench.images)}))
        sides = {
            "LitData": Side(read_through_litdata, {"epochs": _EPOCHS}),
            "raytrain": Side(read_through_raytrain, {"url": "s3://raytrain", "cache": "none", "epochs": _EPOCHS}),
        }
        results = bench.alternate(sides, bench.scaled(3), shown)
    rates = {
        name: [median(values) for values in zip(*map(rates_of, rounds), strict=True)]
        for name, rounds in results.items()
    }
    figures = [Figure(f"{name}, epoch by epoch", "images/s", each) for name, each in rates.items()]
    ours, theirs = rates["raytrain"], rates["LitData"]
    checks = [
        Check("raytrain : LitData, first epoch", ours[0] / theirs[0], at_least=1),
        Check(
            "raytrain, slowest later epoch : LitData, fastest later epoch", min(ours[1:]) / max(theirs[1:]), at_least=1
        ),
    ]
    return Report("packed: 2 workers that read every byte of packed shards", figures, checks)


def pack_both(images: str, folder: str) -> None:
    """Write the images to one bucket as shards of raytrain, and to another as chunks of LitData."""
    for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
        os.environ[name] = str(Path(folder, name))  # by default /tmp/chunks and /tmp/data, whose content it removes
    from litdata import optimize

    from raytrain.datasets.pack import pack
    from raytrain.datasets.upload import upload

    pack(images, "s3://raytrain")
    files = sorted(Path(images).rglob("*.jpg"))
    classes = sorted({file.parent.name for file in files})
    labelled = [(str(file), classes.index(file.parent.name)) for file in files]
    chunks = str(Path(folder, "chunks"))
    optimize(as_item, labelled, chunks, chunk_bytes=_CHUNK_BYTES, num_workers=1)
    upload(chunks, "s3://litdata")


def as_item(labelled: tuple[str, int]) -> dict[str, Any]:
    from litdata import Jpeg

    return {"image": Jpeg(path=labelled[0]), "label": labelled[1]}


def read_through_litdata(
    epochs: int,
    folder: str,
    pixels: int = 32,
    crop: bool = False,
    num_workers: int = NUM_WORKERS,
    normalised: bool = False,
) -> list[Marks]:
    run_in_processes(num_workers, read_part, epochs, folder, pixels, crop, normalised)
    return marks_in(folder)


def read_part(epochs: int, folder: str, pixels: int, crop: bool, normalised: bool) -> None:
    import torch
    import torch.distributed as dist
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader
    from torchvision.transforms import v2

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # LitData requires https by default.

    steps = [v2.RandomResizedCrop(pixels) if crop else v2.Resize([pixels, pixels])]
    if normalised:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, MEAN)]
    transform = v2.Compose(steps)

    def transformed(item: dict[str, Any]) -> dict[str, Any]:
        return item | {"image": transform(item["image"])}

    cache = str(Path(folder, "cache"))
    dataset = StreamingDataset("s3://litdata", cache_dir=cache, shuffle=True, drop_last=True, transform=transformed)
    processes = max((os.cpu_count() or 1) // dist.get_world_size(), 1)  # one for each core of the machine
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=processes, persistent_workers=True, multiprocessing_context="fork"
    )
    dist.barrier()
    read(((epoch, batch["image"]) for epoch in range(epochs) for batch in loader), dist.get_rank(), folder)
