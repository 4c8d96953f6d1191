"""Training, validation and test images of a run, how they are decoded and divided into batches, and class weights."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.duplicates import report_copies, report_trained_on
from raytrain.data.images.crop_box import Cropping
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.label_columns import LabelColumns
from raytrain.data.labels.label_file import LabelTable, read_label_file
from raytrain.data.labels.label_pattern import digest_of_pattern, table_by_pattern
from raytrain.data.labels.labelled_images import labelled_parts
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import HELD_OUT, PARTS, Part
from raytrain.data.mean_std import look_for_black_and_white, measure_mean_std
from raytrain.data.plan.batch_plan import BatchPlan, ClassBalance
from raytrain.errors import StorageError, UsageError, did_you_mean, flag
from raytrain.runs.documents import CLASSES, IMAGES, MANIFEST, TEST_MANIFEST, VALIDATION_MANIFEST
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.open import open_store, read_input
from raytrain.storage.store import Store

BALANCED = "balanced"
_MAX_WEIGHT = float(np.finfo(np.float32).max)  # the loss has the weights of classes in float32
_EVALUATION_BATCH_PER_WORKER = 250  # images


@dataclass(frozen=True)
class Dataset:
    """The images that a run reads. ``mean`` and ``std`` are those of each channel, in 0..1.

    ``train_format`` says how the training images are decoded, ``evaluation_format`` how all others are.
    ``test`` is None if the run has two parts only: the validation images, on which it is measured while it trains, are
    no test. ``stored`` is the training manifest that the run has in storage; None if it is new.
    """

    train_store: Store
    validation_store: Store
    train: Manifest
    validation: Manifest
    train_format: ImageFormat
    evaluation_format: ImageFormat
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stored: Manifest | None = None
    test_store: Store | None = None
    test: Manifest | None = None

    @property
    def parts(self) -> dict[Part, tuple[Store, Manifest, ImageFormat]]:
        """The parts that the run has, each with its store, its images, and how these are decoded."""
        parts: dict[Part, tuple[Store, Manifest, ImageFormat]] = {
            "train": (self.train_store, self.train, self.train_format),
            "validation": (self.validation_store, self.validation, self.evaluation_format),
        }
        if self.test is not None and self.test_store is not None:
            parts["test"] = (self.test_store, self.test, self.evaluation_format)
        return parts

    @property
    def num_images(self) -> int:
        """Number of images of all parts together."""
        return sum(len(images) for _, images, _ in self.parts.values())

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of all training images, in the form in which they travel, and of all validation images, decoded."""
        train_bytes = int(self.train.sizes_bytes.sum())
        if not self.train_format.as_files:
            train_bytes = len(self.train) * self.train_format.shape.num_bytes
        return train_bytes, len(self.validation) * self.evaluation_format.shape.num_bytes

    def plan(self, config: ResolvedConfig) -> BatchPlan:
        """Return the global batches of a run with these options."""
        return training_plan(config, self.train)

    def decoded_as(self, config: ResolvedConfig) -> Dataset:
        """Return the same images, with the decoder and the resizer that these options have decided on."""
        return replace(self, train_format=training_format(config))

    def treated_as(self, config: TrainConfig) -> Dataset:
        """Return the same images, resized, cropped and normalised as these options say."""
        # Smaller images are smoother, and deviate less from their mean.
        format = evaluation_format(config)
        mean, std = config.mean or self.mean, config.std or self.std
        if format != self.evaluation_format:
            mean, std = _mean_std(config, self.train_store, self.train, format)
        return replace(
            self,
            train_format=training_format(config),
            evaluation_format=format,
            mean=mean,
            std=std,
        )

    def kept_on(self, disk: DiskCache | None) -> Dataset:
        """Return the same images; each machine that reads them from a bucket keeps the files on ``disk``, if given."""
        train_store, validation_store = self.train_store.kept_on(disk), self.validation_store.kept_on(disk)
        test_store = self.test_store and self.test_store.kept_on(disk)
        return replace(self, train_store=train_store, validation_store=validation_store, test_store=test_store)

    def write(self, run_store: Store) -> None:
        """Write the manifests into the run's folder, unless they were read from storage and are in that folder, too.

        A trial of a sweep that resumes has its images from the folder of the sweep, and may never have begun before.
        """
        if self.train is not self.stored or not run_store.exists(CLASSES):
            write_manifests(run_store, self.train, self.validation, self.test)


def count_left_out(*parts: Manifest) -> dict[str, int]:
    """Count the unused files beside the images by reason.

    Parts that are in one folder have listed the same files, so only those of the first one count.
    """
    counts, urls = Counter[str](), set[str]()
    for manifest in parts:
        if manifest.url not in urls:
            counts.update(manifest.left_out)
        urls.add(manifest.url)
    return {reason: count for reason, count in counts.items() if count}


def write_manifests(run_store: Store, train: Manifest, validation: Manifest, test: Manifest | None = None) -> None:
    """Write a run's manifests, their summary and its classes into the run's folder."""
    summary: dict[str, Any] = {"training": len(train), "validation": len(validation)}
    parts = [train, validation]
    if test is not None:
        summary["test"] = len(test)
        parts.append(test)
        run_store.put(TEST_MANIFEST, test.to_parquet())
    run_store.put(IMAGES, json.dumps({**summary, "left_out": count_left_out(*parts)}).encode())
    run_store.put(MANIFEST, train.to_parquet())
    run_store.put(VALIDATION_MANIFEST, validation.to_parquet())
    run_store.put(CLASSES, json.dumps(list(train.classes)).encode())  # comes last: Dataset.write looks for it


def open_dataset(config: TrainConfig, run_store: Store | None = None) -> Dataset:
    """List and label the images of all parts, and measure their mean and standard deviation unless these are given.

    A run that resumes reads the manifests in its ``run_store`` instead, unless other images or labels are asked for.

    Raises UsageError if there are no images, or their labels are missing or doubtful, and StorageError if a store
    cannot be read.

    Example: ``open_dataset(cifar10(data="s3://bucket/train")).train.classes``
    """
    # Open the stores of the parts: a part without a URL of its own has its images below --data, or none.
    urls = {"train": config.data, "validation": config.validation_data, "test": config.test_data}
    stores: dict[Part, Store] = {
        part: open_store(urls[part] or config.data) for part in PARTS if urls[part] or part == "train"
    }

    # Read their label files. The one of a part that has no store of its own is about images below --data, so its rows
    # join those of --labels.
    options = {"train": "labels", "validation": "validation_labels", "test": "test_labels"}
    images_urls = [store.url for store in stores.values()]
    columns = label_columns(config)
    tables: dict[Part, LabelTable] = {
        part: read_label_file(file, columns, images_urls, flag(options[part]))
        for part in PARTS
        if (file := getattr(config, options[part]))
    }
    tables_without_store: dict[Part, LabelTable] = {
        part: tables.pop(part) for part in HELD_OUT if part in tables and part not in stores
    }
    if tables_without_store:
        tables["train"] = tables["train"].with_parts(tables_without_store)

    # A run that resumes has manifests. They are used unless other images or labels are asked for now: stores with other
    # URLs, or labels with another digest.
    manifests = _stored_parts(run_store) if run_store else {}
    stored_train = manifests.get("train")
    asked_for: set[tuple[str, str]] = set()
    for part, store in stores.items():
        table = tables.get(part, tables.get("train"))
        digest = table.digest if table else ""
        asked_for.add((store.url, digest_of_pattern(config.label_pattern) if config.label_pattern else digest))
    if {(manifest.url, manifest.labels_digest) for manifest in manifests.values()} != asked_for:
        if config.label_pattern is not None:
            tables |= {
                part: table_by_pattern(store, config.label_pattern, columns, config.max_bad_fraction)
                for part, store in stores.items()
            }
        manifests = labelled_parts(config, stores, tables)
        report_copies(stores, manifests)
    train, validation, test = manifests["train"], manifests["validation"], manifests.get("test")

    # Test images are validation images if there are no others.
    report_trained_on(train, {part: manifests.get(part, validation) for part in HELD_OUT if part in stores})

    held_out_format = evaluation_format(config)
    mean, std = _mean_std(config, stores["train"], train, held_out_format)
    # Measuring mean and deviation reports such images, too, and a run that resumes has reported them before.
    if config.mean is not None and config.std is not None and train is not stored_train:
        look_for_black_and_white(stores["train"], train, held_out_format, config.seed)

    # Held-out images may be in the store of the training images, whichever way they were found there.
    store_of = {store.url: store for store in stores.values()}
    return Dataset(
        train_store=stores["train"],
        validation_store=store_of[validation.url],
        test_store=store_of[test.url] if test is not None else None,
        train=train,
        validation=validation,
        test=test,
        train_format=training_format(config),
        evaluation_format=held_out_format,
        mean=mean,
        std=std,
        stored=stored_train,
    )


def _stored_parts(run_store: Store) -> dict[Part, Manifest]:
    """Return the manifests that a run has stored; none if it is new, or stopped before it had stored all."""
    documents: dict[Part, str] = {"train": MANIFEST, "validation": VALIDATION_MANIFEST, "test": TEST_MANIFEST}
    manifests: dict[Part, Manifest] = {}
    for part, document in documents.items():
        with suppress(FileNotFoundError):
            manifests[part] = Manifest.from_parquet(run_store.get(document))
    return manifests if "validation" in manifests else {}


def evaluation_plan(images: Manifest, num_workers: int) -> BatchPlan:
    """Return the batches in which ``num_workers`` workers evaluate ``images``, each once, in their order."""
    batch_size = _EVALUATION_BATCH_PER_WORKER * num_workers
    return BatchPlan(len(images), batch_size, 1, 0, shuffle=False, shard_shuffle=images.shard_shuffle)


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
    """Return how images are decoded for evaluation and for prediction."""
    # Before a run has resolved its options, those that neither the user nor the weights have decided are None.
    cropping = Cropping(
        config.resize or ResolvedConfig.resize,
        config.crop_fraction or ResolvedConfig.crop_fraction,
        interpolation=config.interpolation or ResolvedConfig.interpolation,
    )
    return ImageFormat(ImageShape(*config.full_image_size, config.channels), cropping)


def training_format(config: TrainConfig) -> ImageFormat:
    """Return how training images are decoded.

    Without random crops, that is as for evaluation. With them, a random part of each image is decoded in each epoch,
    or, with ``--cache-side``, the whole image and larger, so that crops can be cut out of the decoded image later.
    """
    shape, cropping, _ = evaluation_format(config)
    resizer = "pillow" if config.resizer == "auto" else config.resizer
    cropping = replace(cropping, resizer=resizer)
    as_files = config.decoder == "gpu"
    if not config.random_resized_crop:
        return ImageFormat(shape, cropping, as_files)

    # Only crops of the originals have a seed here: the others are cut out of the decoded image by the augmentation.
    height, width = (round(side * (config.cache_side or 1)) for side in shape.size)
    crop_seed = config.seed if config.crops_originals else None
    return ImageFormat(
        ImageShape(height, width, config.channels),
        Cropping(crop_seed=crop_seed, interpolation=cropping.interpolation, resizer=resizer),
        as_files,
    )


def _mean_std(
    config: TrainConfig, store: Store, train: Manifest, format: ImageFormat
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel; what the options do not give is measured."""
    if config.mean is not None and config.std is not None:
        return config.mean, config.std
    mean, std = measure_mean_std(store, train, format, config.seed)  # decodes up to 1,024 images
    return config.mean or mean, config.std or std


def class_weights(option: str | None, train: Manifest) -> tuple[float, ...] | None:
    """Return the weight of each class that ``--class-weights`` asks for; None if it is not given.

    Balanced weights are N / (C · n_c), with n_c of the N images in class c of C: their mean over all images is 1. If an
    image may have several classes, the weight (N - n_c) / n_c applies to the images that have class c. Any other
    option is a JSON object with a number for each class, or a file with one; raises UsageError if it is neither, or if
    no training image has a class with a weight above 0.
    """
    if option is None:
        return None
    if option == BALANCED:
        sizes = train.class_counts().clip(min=1)
        if train.label_sets is not None:
            return tuple(((len(train) - sizes).clip(min=1) / sizes).tolist())
        return tuple((len(train) / (len(sizes) * sizes)).tolist())
    weights = _read_class_weights(option)

    # Each class needs a weight, and no other name may have one.
    def is_weight(value: object) -> bool:
        return type(value) in (int, float) and 0 <= cast(float, value) <= _MAX_WEIGHT

    names = sorted({*train.classes, *weights})
    if wrong := [name for name in names if name not in train.classes or not is_weight(weights.get(name))]:
        raise UsageError(
            f"--class-weights: {option} must have a number of at least 0 for each of the {len(train.classes):,} "
            f"classes and nothing else; that is not so for {len(wrong):,}, such as {wrong[0]!r}."
        )
    if not any(weights[name] for name, count in zip(train.classes, train.class_counts(), strict=True) if count):
        raise UsageError(
            f"--class-weights: {option} is 0 for each class that a training image has, so nothing would be learned; "
            "give one of them a weight above 0."
        )
    return tuple(float(weights[name]) for name in train.classes)


def _read_class_weights(option: str) -> dict[str, Any]:
    """Return the JSON object that ``--class-weights`` is, or that is in the file which it names.

    Raises UsageError if there is none, or if a name occurs twice in it.
    """

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if repeated := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise UsageError(f"--class-weights: {option} has several weights for {repeated[0]!r}; give one.")
        return dict(pairs)

    try:
        text = option if option.lstrip().startswith("{") else read_input(option, "--class-weights")
        weights: Any = json.loads(text, object_pairs_hook=without_repetition)
    except UsageError:  # a ValueError, too
        raise
    except StorageError as error:
        if hint := did_you_mean(option, [BALANCED]):
            raise UsageError(f"--class-weights is {option}{hint}; there is no file of that name.") from error
        raise
    except (ValueError, RecursionError):
        weights = None
    if not isinstance(weights, dict):
        raise UsageError(
            f"--class-weights is {option}, which must be balanced, or JSON with a weight for each class, such as "
            '{"cat": 2, "dog": 1}, or a file of it.'
        )
    return cast("dict[str, Any]", weights)
