"""The images of a run: its training and test manifests, the shape that they are decoded to, and their statistics."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np

from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.decode import ImageReader, ImageShape
from raytrain.data.manifest import Manifest, build_manifest, split
from raytrain.errors import UsageError
from raytrain.runs.layout import CLASSES, MANIFEST, TEST_MANIFEST
from raytrain.storage.base import Store
from raytrain.storage.open import open_store

_NUM_MEASURED = 1024
_TEST_BATCH_PER_WORKER = 250
_CROP_MARGIN = 8 / 7  # random crops are cut from images a little larger, as 256 is to 224


@dataclass(frozen=True)
class Dataset:
    """What a run reads. ``mean`` and ``std`` of each channel are in 0..1."""

    train_store: Store
    test_store: Store
    train: Manifest
    test: Manifest
    shape: ImageShape
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def plan(self, config: TrainConfig) -> BatchPlan:
        """The global batches of a run with these options, which are resolved."""
        assert config.batch_size is not None, "the configuration is not resolved"
        return BatchPlan(
            len(self.train),
            config.batch_size,
            config.epochs,
            config.seed,
            max_steps=config.max_steps,
            accumulate=config.accumulate,
            lanes=self.train.lanes,
        )

    def test_plan(self, num_workers: int) -> BatchPlan:
        """The batches in which so many workers evaluate."""
        return BatchPlan(len(self.test), _TEST_BATCH_PER_WORKER * num_workers, 1, 0, shuffle=False, lanes=self.test.lanes)

    def write(self, run_store: Store) -> None:
        """Keep the manifests with the run."""
        write_manifests(run_store, self.train, self.test)


def write_manifests(run_store: Store, train: Manifest, test: Manifest) -> None:
    """Keep with a run which images it reads, and their classes."""
    run_store.put(MANIFEST, train.to_parquet())
    run_store.put(TEST_MANIFEST, test.to_parquet())
    run_store.put(CLASSES, json.dumps(list(train.classes)).encode())


def open_dataset(config: TrainConfig, run_store: Store) -> Dataset:
    """List the images (or take the manifests that the run keeps), and measure their statistics where none are given.

    Raises StorageError where a store cannot be read, UsageError where what lies in it is no data set of images.
    """
    train_store = open_store(config.data)
    test_store = open_store(config.test_data) if config.test_data else train_store
    train, test = _kept_manifests(config, run_store) or _list_manifests(config, train_store, test_store)
    shape = decoded_shape(config)
    mean, std = config.mean, config.std
    if mean is None or std is None:
        measured_mean, measured_std = measure(train_store, train, shape, config.seed)
        mean, std = mean or measured_mean, std or measured_std
    return Dataset(train_store, test_store, train, test, shape, mean, std)


def decoded_shape(config: TrainConfig) -> ImageShape:
    """The shape that images are decoded to: what the network sees, with a margin for random crops."""
    margin = _CROP_MARGIN if config.random_resized_crop else 1
    height, width = (round(side * margin) for side in config.image_size)
    return ImageShape(height, width, config.channels)


def measure(store: Store, manifest: Manifest, shape: ImageShape, seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in 0..1, over a random 1,024 images at most; packed ones were shuffled before."""
    order = np.arange(len(manifest)) if manifest.packing is not None else np.random.default_rng(seed).permutation(len(manifest))
    images, bad = ImageReader(store, shape).read(manifest.select(np.sort(order[:_NUM_MEASURED])))
    pixels = np.delete(images, list(bad), axis=0).reshape(-1, shape.channels) / 255
    if not len(pixels):
        reason = next(iter(bad.values()))
        raise UsageError(f"None of {len(bad):,} images looked at in {store.url} can be read ({reason}); check what lies there.")
    mean, std = pixels.mean(axis=0), pixels.std(axis=0)
    return tuple(round(value, 6) for value in mean.tolist()), tuple(max(round(value, 6), 1e-3) for value in std.tolist())


def _kept_manifests(config: TrainConfig, run_store: Store) -> tuple[Manifest, Manifest] | None:
    """The manifests that the run was begun with, where it goes on with the same data."""
    try:
        train, test = (Manifest.from_parquet(run_store.get(path)) for path in (MANIFEST, TEST_MANIFEST))
    except FileNotFoundError:
        return None
    same = train.url == open_store(config.data).url and test.url == open_store(config.test_data or config.data).url
    return (train, test) if same else None


def _list_manifests(config: TrainConfig, train_store: Store, test_store: Store) -> tuple[Manifest, Manifest]:
    manifest = build_manifest(train_store)
    if config.test_data:
        return manifest, build_manifest(test_store, classes=manifest.classes)
    smallest = min(np.bincount(manifest.labels, minlength=len(manifest.classes)))
    if smallest < 2:
        needed = math.ceil(1 / config.test_fraction)
        raise UsageError(
            f"A class in {manifest.url} has one image only, so none can be held out for testing; add images ({needed} a class make "
            f"--test-fraction {config.test_fraction} exact) or give --test-data."
        )
    return split(manifest, config.test_fraction, config.seed)
