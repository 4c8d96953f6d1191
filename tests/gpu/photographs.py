"""Photographs: how busy a GPU is while they are streamed, and whether it had better decode them itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

import raytrain
from raytrain.data.images.crop_box import Cropping, fastest_resizer
from raytrain.data.images.decode import decode
from raytrain.data.images.image_format import ImageShape
from raytrain.loader.decoder_processes import num_decoders
from raytrain.loader.machine import cores, gpu_decoder_problem
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.machine_history import MachineUse
from raytrain.training.batches.device_decoder import cut_and_resize, decode_jpegs
from tests.gpu.trial import Trial
from tests.helpers.photographs import write_photographs

_SIDE = 224


def streamed(trial: Trial) -> None:
    """ResNet-50 on JPEGs that are decoded whenever they are needed, and on cached ones: how busy the GPU is."""
    photographs = trial.folder / "photographs"
    write_photographs(photographs, trial.scaled(1024, on_cpu=60))
    trial.says(f"{num_decoders()} threads decode, of {cores()} cores, with {fastest_resizer()} as resizer")
    problem = gpu_decoder_problem(trial.device)
    if problem is not None:
        trial.says(f"without --decoder gpu: {problem}")
    decoders = ("cpu", "gpu") if problem is None else ("cpu",)
    for cache, decoder in product(("none", "memory"), decoders):
        watch = Watch(trial)
        result = raytrain.train(_options(trial, photographs, cache, decoder), view=watch)
        rates = list(watch.uses.values())[1:]  # while the first was measured, the GPU chose its kernels
        name = f"--cache {cache} --decoder {decoder}"
        trial.says(f"{name}: {result.steps} steps in {result.seconds - (result.startup_seconds or 0):.1f} s")
        if rates:
            trial.figure(name, "images/s", *(use.images_per_s for use in rates))
            trial.figure(f"{name}: the loop waits for images", "of 1", *(use.data_wait_fraction for use in rates))
            trial.figure(f"{name}: use of the cores", "of 1", *(use.cpu_fraction or 0.0 for use in rates))
        if watch.busy:
            trial.figure(f"{name}: the GPU is idle", "of 1", 1 - mean(watch.busy), 1 - median(watch.busy))
        trial.holds(f"{name}: the run stopped when its time was up", result.status == "stopped")
        trial.holds(f"{name}: the GPU decoded all images that it should", result.num_decoded_on_cpu == 0)


def _options(trial: Trial, photographs: Path, cache: Any, decoder: Any) -> raytrain.TrainConfig:
    return raytrain.recipes.custom(
        data=str(photographs),
        name=f"photographs-{cache}-{decoder}",
        storage=str(trial.folder / "runs"),
        model="resnet50" if trial.on_gpu else "tests.helpers.memory_runs:network",
        image_size=(_SIDE, _SIDE),
        random_resized_crop=True,
        cache_side=1.0 if cache == "memory" and decoder == "cpu" else None,  # files give crops of the originals
        decoder=decoder,
        flip="random",
        batch_size=trial.scaled(256, on_cpu=8),
        epochs=1000,
        max_time=f"{trial.scaled(24, on_cpu=12)}s",
        evaluate_every=0,
        checkpoint_every=(),
        channels_last=True,
        precision="bfloat16" if trial.on_gpu else "float32",
        workers=1,
        backend="local",
        device=trial.device,
        cache=cache,
    )


class Watch:
    """A view of a run: what each worker measures, and how busy the GPU is, twice a second from then on."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.uses: dict[tuple[float, int | None], MachineUse] = {}
        self.busy: list[float] = []

    def __call__(self, snapshot: Snapshot) -> None:
        for use in snapshot.machines:
            self.uses.setdefault((use.images_per_s, use.step), use)
        if self.uses and self._trial.on_gpu and not snapshot.over:
            self.busy.append(torch.cuda.utilization() / 100)


def decoded(trial: Trial) -> None:
    """JPEGs decoded and resized on the cores, and on the device (by nvJPEG on a GPU), and how their pixels differ."""
    write_photographs(trial.folder / "photographs", trial.scaled(128, on_cpu=10))
    files = [file.read_bytes() for file in sorted((trial.folder / "photographs").rglob("*.jpg"))]
    trial.says(f"{len(files)} JPEGs of 500x375, {np.mean([len(file) for file in files]) / 1000:.0f} KB each")
    crop = Cropping(resizer=fastest_resizer()).crop
    on_cores = partial(decode, shape=ImageShape(_SIDE, _SIDE, 3), crop=crop)
    rounds = trial.scaled(5, on_cpu=1)
    for threads in (1, num_decoders(), cores()):
        with ThreadPoolExecutor(threads) as pool:
            rate = _rate(trial, lambda pool=pool: list(pool.map(on_cores, files * 2)), 2 * len(files), rounds)
        trial.figure(f"raytrain, {threads} threads", "images/s", *rate)
    device = torch.device(trial.device)
    try:
        decode_jpegs(files[:1], 3, device)
    except (ImportError, OSError, RuntimeError) as error:
        trial.says(f"torchcodec decodes nothing on {device}: {error!r:.200}")
        return
    for size in (1, 32, len(files)):
        rate = _rate(trial, partial(_on_device, files, size, device, resizes=False), len(files), rounds)
        trial.figure(f"torchcodec on {device}, {size} at a time", "images/s", *rate)
        rate = _rate(trial, partial(_on_device, files, size, device), len(files), rounds)
        trial.figure(f"torchcodec on {device}, {size} at a time, with crops and resizing", "images/s", *rate)
    ours = torch.stack([torch.from_numpy(on_cores(file).copy()) for file in files])
    theirs = torch.cat(_on_device(files, len(files), device)).cpu()
    levels = (ours.double() - theirs.double()).abs()
    trial.check("mean difference of the pixels", levels.mean().item(), "of 255", at_most=2)
    trial.figure("largest difference of a pixel", "of 255", levels.max().item())
    alone = torch.cat(_on_device(files, 1, device)).cpu()
    trial.holds("an image is the same in any batch", bool((alone == theirs).all()))


def _on_device(files: Sequence[bytes], size: int, device: torch.device, *, resizes: bool = True) -> list[Tensor]:
    """All images on the device, decoded ``size`` at a time, uint8; each list (n, SIDE, SIDE, 3) if they are resized."""
    batches: list[Tensor] = []
    for start in range(0, len(files), size):
        images = decode_jpegs(files[start : start + size], 3, device)
        boxes = [Cropping().crop((image.shape[1], image.shape[2]), (_SIDE, _SIDE)) for image in images]
        batches += [cut_and_resize(images, boxes, (_SIDE, _SIDE))] if resizes else images
    return batches


def _rate(trial: Trial, action: Callable[[], object], num_images: int, rounds: int) -> list[float]:
    """Images per second in each round; the median of them is what counts."""
    action()
    times: list[float] = []
    for _ in range(rounds):
        trial.synchronise()
        started = time.perf_counter()
        action()
        trial.synchronise()
        times.append(time.perf_counter() - started)
    assert median(times) > 0
    return [num_images / seconds for seconds in times]
