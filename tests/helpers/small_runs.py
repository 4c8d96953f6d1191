"""Small runs through Ray: their images, their options, and the comparison of their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import raytrain
from raytrain import TrainConfig
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.training.checkpoint import read_checkpoint

NUM_IMAGES = 90
CLASSES = ("blue", "green", "red")


def make_images(folder: Path, num_images: int = NUM_IMAGES) -> Path:
    """Write 12x12 PNGs of noise, tinted by class, into three class folders."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(reversed(CLASSES)):
        (folder / name).mkdir()
        for number in range(num_images // 3):
            pixels = random.integers(0, 180, (12, 12, 3), dtype=np.uint8)
            pixels[:, :, channel] += 75
            Image.fromarray(pixels).save(folder / name / f"{number:03d}.png")
    return folder


def put_images(images: Path, store: Store) -> None:
    """Copy the images into a store."""
    folder = open_store(str(images))
    for found in folder.list():
        store.put(found.path, folder.get(found.path))


def config(images: Path | str, storage: Path | str, **options: Any) -> TrainConfig:
    base = {
        "name": "run",
        "data": str(images),
        "storage": str(storage),
        "model": "tests.helpers.memory_runs:network",
        "image_size": (12, 12),
        "batch_size": 20,
        "learning_rate": 0.05,
        "epochs": 4,
        "workers": 2,
        "log_every": 1,
        "precision": "float64",
        "mean": (0.4, 0.4, 0.4),  # these two are given so that no process has to decode images to measure them
        "std": (0.2, 0.2, 0.2),
        "flip": "random",
        "translate": 1,
    }
    return TrainConfig(**{**base, **options})


def local_config(images: Path | str, storage: Path | str, **options: Any) -> TrainConfig:
    """``config`` on this machine, without Ray."""
    return config(images, storage, backend="local", **options)


def documents(storage: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, by its path."""
    return {str(file.relative_to(storage)): file.read_bytes() for file in storage.rglob("*") if file.is_file()}


def weights(result: raytrain.TrainResult) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    store = open_store(result.run_dir)
    return read_checkpoint(store, result.checkpoint.removeprefix(store.url).lstrip("/")).state["model"]


def assert_same_weights(one: raytrain.TrainResult, other: raytrain.TrainResult) -> None:
    ours, theirs = weights(one), weights(other)
    assert max((ours[name].double() - theirs[name].double()).abs().max().item() for name in theirs) < 1e-10


def check_keys(run: raytrain.Run, batch: raytrain.Batch) -> None:
    """Check that the keys of ``batch``, and in the first step those of all evaluation batches, are of its images.

    They are if the file of each is in the folder of its class, and no two are the same.
    """
    measured = [] if batch.step else list(run.evaluation_batches())
    for images in (batch, *batch.microbatches(), *measured):
        keys = run.keys(images)
        classes = [run.classes[label] for label in images.labels] if images.num_used else [""]
        assert [Path(key).parent.name for key in keys] == classes
        assert len({*keys}) == len(keys) == len(images.images)


def loop_with(
    run: raytrain.Run,
    before_step: Callable[[raytrain.Run, raytrain.Batch], object] = lambda run, batch: None,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Train as the built-in loop, which may resume from what this one has prepared, and vice versa.

    ``before_step`` is called before each step, and ``evaluate`` measures the run in place of the built-in evaluation.
    """
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    scheduler = run.prepare(run.build_scheduler(optimizer))
    scaler = run.prepare(torch.amp.GradScaler(run.device.type, enabled=run.config.precision == "float16"))
    for epoch in run.epochs(evaluate):
        for batch in epoch:
            before_step(run, batch)
            optimizer.zero_grad()
            logits = model(batch.images)
            loss = run.loss(logits, batch.targets)
            scaler.scale(loss).backward()
            run.log(loss=loss, accuracy=run.accuracy(logits, batch))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
