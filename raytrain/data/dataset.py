"""Training and test images of a run, their statistics, and weights of their classes."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.images.crop_box import Cropping
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.images.image_reader import readable_images
from raytrain.data.labels.label_file import LabelColumns, read_label_file
from raytrain.data.labels.labelled_images import training_and_test_images
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.batch_plan import BatchPlan, ClassBalance
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.runs.documents import CLASSES, IMAGES, MANIFEST, TEST_MANIFEST
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.open import open_store, read_input
from raytrain.storage.store import Store

BALANCED = "balanced"
_NUM_MEASURED_IMAGES = 1024
_TEST_BATCH_PER_WORKER = 250


@dataclass(frozen=True)
class Dataset:
    """The images that a run reads. ``mean`` and ``std`` are those of each channel, in 0..1.

    ``train_format`` and ``test_format`` say how they are decoded.
    ``stored`` is the training manifest that the run has in storage; None if it is new.
    """

    train_store: Store
    test_store: Store
    train: Manifest
    test: Manifest
    train_format: ImageFormat
    test_format: ImageFormat
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stored: Manifest | None = None

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of all decoded training images, and of all test images."""
        return len(self.train) * self.train_format.shape.num_bytes, len(self.test) * self.test_format.shape.num_bytes

    def plan(self, config: ResolvedConfig) -> BatchPlan:
        """Return the global batches of a run with these options."""
        return training_plan(config, self.train)

    def test_plan(self, num_workers: int) -> BatchPlan:
        """Return the batches in which ``num_workers`` workers evaluate."""
        batch_size = _TEST_BATCH_PER_WORKER * num_workers
        return BatchPlan(len(self.test), batch_size, 1, 0, shuffle=False, shard_shuffle=self.test.shard_shuffle)

    def read_by(self, config: ResolvedConfig) -> Dataset:
        """Return the same images, decoded as a run with these options decided."""
        return replace(self, train_format=training_format(config))

    def kept_on(self, disk: DiskCache | None) -> Dataset:
        """Return the same images, whose files are kept on a disk of each machine that reads them."""
        train_store, test_store = self.train_store.kept_on(disk), self.test_store.kept_on(disk)
        return replace(self, train_store=train_store, test_store=test_store)

    def write(self, run_store: Store) -> None:
        """Write the manifests into the run's folder, unless they were read from there."""
        if self.train is not self.stored:
            write_manifests(run_store, self.train, self.test)


def count_left_out(train: Manifest, test: Manifest) -> dict[str, int]:
    """Return how many files beside the images are not used, by reason; each once if both are in one folder."""
    apart = test.url != train.url
    return dict(Counter(train.left_out) + (Counter(test.left_out) if apart else Counter()))


def write_manifests(run_store: Store, train: Manifest, test: Manifest) -> None:
    """Write a run's manifests, their summary and its classes into the run's folder."""
    summary = {"training": len(train), "test": len(test), "left_out": count_left_out(train, test)}
    run_store.put(IMAGES, json.dumps(summary).encode())
    run_store.put(MANIFEST, train.to_parquet())
    run_store.put(TEST_MANIFEST, test.to_parquet())
    run_store.put(CLASSES, json.dumps(list(train.classes)).encode())


def open_dataset(config: TrainConfig, run_store: Store | None = None) -> Dataset:
    """List the images, or read the manifests that a run has stored, and measure statistics.

    Raises UsageError if there are no images.
    """
    train_store = open_store(config.data)
    test_store = open_store(config.test_data) if config.test_data else train_store
    urls = [train_store.url, test_store.url]
    table, test_table = (
        read_label_file(file, label_columns(config), urls) if file else None
        for file in (config.labels, config.test_labels)
    )
    if table is not None and test_table is not None and not config.test_data:
        table, test_table = table.tested_on(test_table), None

    # A run that resumes has manifests. They are used unless other images or labels are asked for now.
    stored: list[Manifest] = []
    with suppress(FileNotFoundError):  # it is new
        stored = [Manifest.from_parquet(run_store.get(path)) for path in (MANIFEST, TEST_MANIFEST)] if run_store else []
    digests = [labels.digest if labels else "" for labels in (table, test_table or table)]
    asked_for = list(zip(urls, digests, strict=True))
    if [(manifest.url, manifest.labels_digest) for manifest in stored] == asked_for:
        train, test = stored
    else:
        train, test = training_and_test_images(config, table, test_table, train_store, test_store)

    test_format = evaluation_format(config)
    mean, std = config.mean, config.std
    if mean is None or std is None:
        measured_mean, measured_std = measure_mean_std(train_store, train, test_format, config.seed)
        mean, std = mean or measured_mean, std or measured_std
    stored_train = stored[0] if stored else None
    return Dataset(train_store, test_store, train, test, training_format(config), test_format, mean, std, stored_train)


def training_plan(config: ResolvedConfig, train: Manifest) -> BatchPlan:
    """Return the global batches of a run with these options and training images."""
    return BatchPlan(
        len(train),
        config.batch_size,
        config.epochs,
        config.seed,
        max_steps=config.max_steps,
        accumulate=1 if config.accumulate == "auto" else config.accumulate,
        shard_shuffle=train.shard_shuffle,
        balance=ClassBalance.of(train.labels) if config.sampling == "balanced" else None,
    )


def label_columns(config: TrainConfig) -> LabelColumns:
    """Return the columns of the label file that the options name."""
    return LabelColumns(config.key_column, config.label_column, config.group_by, config.label_separator)


def evaluation_format(config: TrainConfig) -> ImageFormat:
    """Return how images are decoded on which the network is evaluated or used."""
    cropping = Cropping(
        config.resize or ResolvedConfig.resize,
        config.crop_fraction or ResolvedConfig.crop_fraction,
        interpolation=config.interpolation or ResolvedConfig.interpolation,
    )
    return ImageFormat(ImageShape(*config.full_image_size, config.channels), cropping)


def training_format(config: TrainConfig) -> ImageFormat:
    """Return how images are decoded for training: at random parts, or with a margin if random crops are cut later."""
    shape, cropping = evaluation_format(config)
    resizer = "pillow" if config.resizer == "auto" else config.resizer
    cropping = replace(cropping, resizer=resizer)
    if not config.random_resized_crop:
        return ImageFormat(shape, cropping)
    height, width = (round(side * (config.cache_side or 1)) for side in shape.size)
    crop_seed = config.seed if config.crops_originals else None
    return ImageFormat(
        ImageShape(height, width, config.channels),
        Cropping(crop_seed=crop_seed, interpolation=cropping.interpolation, resizer=resizer),
    )


def measure_mean_std(
    store: Store, manifest: Manifest, format: ImageFormat, seed: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel in 0..1, over at most 1,024 random images."""
    chosen = manifest.select(np.sort(random_order(manifest, seed)[:_NUM_MEASURED_IMAGES]))
    images = readable_images(store, chosen, *format)
    sums = np.zeros((2, format.shape.channels))  # of values and squares, image by image: all as float64 take GBs
    for image in images:
        values = image.reshape(-1, format.shape.channels) / 255
        sums += values.sum(axis=0), np.square(values).sum(axis=0)
    mean, square = sums / (len(images) * format.shape.height * format.shape.width)
    std = np.sqrt(np.maximum(square - mean**2, 0)).clip(min=1e-3)
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def random_order(manifest: Manifest, seed: int) -> Int64s:
    """Return all images in a random order, (N,); packed ones in theirs, which is random already."""
    order = np.arange(len(manifest))
    return order if manifest.packing is not None else np.random.default_rng(seed).permutation(order)


def class_weights(option: str | None, train: Manifest) -> tuple[float, ...] | None:
    """Return the weight of each class that ``--class-weights`` asks for; None if it is not given.

    Balanced weights are N / (C · n_c), with n_c of the N images in class c of C: their mean over all images is 1. If an
    image may have several classes, a weight is that of the images that have the class: (N - n_c) / n_c.
    Raises UsageError if a file is not a JSON object with a number for each class.
    """
    if option is None:
        return None
    if option == BALANCED:
        sizes = train.class_counts().clip(min=1)
        if train.label_sets is not None:
            return tuple(((len(train) - sizes).clip(min=1) / sizes).tolist())
        return tuple((len(train) / (len(sizes) * sizes)).tolist())

    # Anything else is a file of weights.
    try:
        weights: Any = json.loads(read_input(option))
    except (ValueError, RecursionError):
        weights = None
    if not isinstance(weights, dict):
        raise UsageError(
            f"--class-weights is {option}, which must be balanced or a JSON file such as {{class: weight}}."
        )

    def is_weight(value: object) -> bool:
        return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0

    names = sorted({*train.classes, *weights})
    if wrong := [name for name in names if name not in train.classes or not is_weight(weights.get(name))]:
        raise UsageError(
            f"--class-weights: {option} must have a number of at least 0 for each of the {len(train.classes):,} "
            f"classes and nothing else; that is not so for {len(wrong):,}, such as {wrong[0]!r}."
        )
    return tuple(float(weights[name]) for name in train.classes)
