"""`raytrain look`: counts the classes of a data set, finds bad images and duplicates, and augments the first images."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.named_functions import load_optional
from raytrain.data.blocks import LocalBatch
from raytrain.data.dataset import Dataset, count_left_out
from raytrain.data.duplicates import Duplicates, StoredImages, find_duplicates
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.decode import read_header
from raytrain.data.images.decode_process import DecodeProcess
from raytrain.data.images.fetch_and_decode import ImageReader, read_contents, require_bytes
from raytrain.data.images.image_format import BadImage, ImageHeader
from raytrain.data.labels.manifest import Shrinking
from raytrain.data.plan.batch_plan import samples_of
from raytrain.data.plan.permutation import Int64s
from raytrain.diagnostics.suspicious_labels import check_can_rank, rank_labels, write_labels
from raytrain.errors import UsageError
from raytrain.launch.choose_options import open_decided
from raytrain.launch.option_checks import check_named
from raytrain.launch.suspicious_pictures import read_training_pictures
from raytrain.runs.documents import new_name, plain, run_store
from raytrain.runs.metric_row import NUM_SUSPICIOUS_SHOWN, SkippedImage
from raytrain.storage.store import Store
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import Batch
from raytrain.training.batches.device_batches import to_batch
from raytrain.training.batches.mixup import mix_batch
from raytrain.training.batches.user_transforms import UserTransforms
from raytrain.training.metrics.gallery import screen_pixels

_MAX_SAMPLED = 2048  # images of each part that are decoded
_NUM_READ_AT_ONCE = 64  # images
_NUM_SHOWN = 40  # images after augmentation
_MAX_SUSPICIOUS = 100  # images whose labels look wrong
_SAMPLING_FRACTION = 0.5  # of the time; the rest is for duplicates
_MAX_SIDE = 256  # height and width, in pixels, beyond which images are made smaller


@dataclass(frozen=True)
class ClassCount:
    """Number of images of a class in each part."""

    name: str
    training: int
    validation: int
    test: int = 0


class MinMedianMax(NamedTuple):
    """The smallest, the middle and the largest of some whole numbers."""

    min: int
    median: int
    max: int

    @classmethod
    def of(cls, values: Iterable[int]) -> MinMedianMax | None:
        """Return the smallest, the middle and the largest of ``values``; None if there are no values."""
        numbers = np.fromiter(values, np.int64)
        return cls(*(int(statistic(numbers)) for statistic in (np.min, np.median, np.max))) if len(numbers) else None


@dataclass(frozen=True)
class ImageSample:
    """Formats and sizes of ``images`` random images, and those that cannot be read."""

    images: int  # number of images that were looked at
    formats: dict[str, int]  # number of images by format, the most frequent first
    width: MinMedianMax | None  # pixels
    height: MinMedianMax | None
    unreadable: tuple[SkippedImage, ...]


@dataclass(frozen=True, eq=False)
class FirstImages:
    """Images after augmentation, with their labels: a class or several, with their shares if images are mixed."""

    pixels: Pixels  # (n, H, W, C)
    labels: tuple[str, ...]  # (n,)


@dataclass(frozen=True, eq=False)
class SuspiciousImages:
    """Training images whose labels look wrong, the worst first, as a run has found while it trained.

    ``rows`` are the first rows of :class:`raytrain.diagnostics.suspicious_labels.RankedLabels`.
    """

    rows: tuple[dict[str, Any], ...]
    pixels: tuple[Pixels | None, ...]  # (H, W, C) each, of the first ones; None if an image cannot be read
    label_files: dict[str, str]  # the files that were written, by the option that takes each
    replaces_pattern: bool = False  # True if the files replace the run's --label-pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class LookResult:
    """Contents of a data set: its classes, its files, and its first images as a network would see them."""

    title: str
    data: str
    validation_data: str
    test_data: str | None  # None if there are two parts
    training_images: int
    validation_images: int
    test_images: int
    left_out: dict[str, int]  # number of other files, by the reason why they are not used
    shrinking: Shrinking | None  # how images were shrunk when they were packed
    classes: tuple[ClassCount, ...]
    size_bytes: MinMedianMax | None  # of the files of the training images
    sample: ImageSample
    duplicates: Duplicates
    first_images: FirstImages
    suspicious: SuspiciousImages | None = None  # of a run that exists already

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values, without the title and the pixels.

        In place of ``suspicious`` are its rows, as ``suspicious_labels``, and its ``label_files``; both are empty
        without it.
        """
        fields = {**vars(self)}
        for name in ("title", "first_images", "suspicious"):
            del fields[name]
        fields["suspicious_labels"] = () if self.suspicious is None else self.suspicious.rows
        fields["label_files"] = {} if self.suspicious is None else self.suspicious.label_files
        return plain(fields)


def look_at(config: TrainConfig, *, limit_s: float = 30.0, write_labels: str | None = None) -> LookResult:
    """Look at the images with which a run with these options would be trained and evaluated. Nothing is trained.

    After ``limit_s`` seconds, no more files are read; the result has the number of those that were. If ``config``
    resumes a run, the result has the training images whose labels look wrong to that run, and ``write_labels`` names a
    label file to write, .csv or .parquet. Raises UsageError or StorageError if the data cannot be read, no run could
    start, or ``write_labels`` is given and there is no run that ranks its labels.

    Example: ``look_at(cifar10(data="s3://bucket/train")).summary()``
    """
    check_named(config)
    if not limit_s >= 0:
        raise UsageError(f"--limit-s is {limit_s:g}; it must be at least 0.")
    if write_labels is not None and not config.resume:
        check_can_rank(config, None)

    # A run that resumes keeps the images in its folder; otherwise a new name stands for the run that could start.
    name = (config.resume and config.name) or new_name(config.recipe)
    store = run_store(config.storage, name)
    config, data = open_decided(config, store, needs_weights=False)
    suspicious = _suspicious_images(config, store, data, write_labels)

    # Half of the time is for finding images that cannot be read, the other half for finding duplicates.
    started_s = time.monotonic()
    sample = sample_images(data, config.seed, started_s + _SAMPLING_FRACTION * limit_s)
    parts = [StoredImages(store, manifest) for store, manifest, _ in data.parts.values()]
    duplicates = find_duplicates(parts, started_s + limit_s)

    counts = (part.manifest.class_counts().tolist() for part in parts)
    return LookResult(
        title=config.name or config.recipe,
        data=data.train.url,
        validation_data=data.validation.url,
        test_data=None if data.test is None else data.test.url,
        training_images=len(data.train),
        validation_images=len(data.validation),
        test_images=len(data.test or ()),
        left_out=count_left_out(*(part.manifest for part in parts)),
        shrinking=data.train.shrinking,
        classes=tuple(map(ClassCount, data.train.classes, *counts)),
        size_bytes=MinMedianMax.of(data.train.sizes_bytes.tolist()),
        sample=sample,
        duplicates=duplicates,
        first_images=first_images(config, data, _NUM_SHOWN),
        suspicious=suspicious,
    )


def _suspicious_images(
    config: TrainConfig, store: Store, data: Dataset, write_to: str | None
) -> SuspiciousImages | None:
    """Return the images whose labels look wrong to the run in ``store``; None if it does not rank its labels.

    If ``write_to`` names a label file, write it, and those of parts in other folders; raise UsageError then if the run
    does not rank its labels.
    """
    ranked = rank_labels(config, store, data) if config.resume else None
    if write_to is not None:
        ranked = check_can_rank(config, ranked)
    if ranked is None:
        return None
    files = write_labels(ranked, data, write_to, config) if write_to is not None else {}
    rows = tuple(row for row in ranked.table.slice(0, _MAX_SUSPICIOUS).to_pylist() if row["draws"])
    pixels = read_training_pictures(data, ranked.samples[: min(NUM_SUSPICIOUS_SHOWN, len(rows))].tolist(), _MAX_SIDE)
    return SuspiciousImages(rows, tuple(pixels), files, replaces_pattern=config.label_pattern is not None)


def sample_images(data: Dataset, seed: int, deadline_s: float) -> ImageSample:
    """Decode up to 2,048 random images of each part, in another process, until ``deadline_s`` of ``time.monotonic``."""
    headers: list[ImageHeader] = []
    unreadable: list[SkippedImage] = []
    # A file may crash a decoder, or make it use all memory; another process keeps that from this one.
    with DecodeProcess(data.evaluation_format.shape) as process:
        for key, content in _contents(data, seed, deadline_s):
            try:
                file = require_bytes(content)
                process.decode(file)
                headers.append(read_header(file))
            except BadImage as error:
                unreadable.append(SkippedImage(key, str(error)))
    return ImageSample(
        images=len(headers) + len(unreadable),
        formats=dict(Counter(header.format for header in headers).most_common()),
        width=MinMedianMax.of(header.width for header in headers),
        height=MinMedianMax.of(header.height for header in headers),
        unreadable=tuple(unreadable),
    )


def _contents(data: Dataset, seed: int, deadline_s: float) -> Iterator[tuple[str, bytes | Exception]]:
    """Yield the key of random images, and their content or why it cannot be read: some of each part in turn.

    The first ones of each part are read even if ``deadline_s`` has passed.
    """
    parts = [(store, manifest) for store, manifest, _ in data.parts.values()]
    orders = [manifest.random_order(seed) for _, manifest in parts]
    for start in range(0, _MAX_SAMPLED, _NUM_READ_AT_ONCE):
        if start and time.monotonic() >= deadline_s:
            return
        for (store, manifest), order in zip(parts, orders, strict=True):
            images = manifest.select(order[start : start + _NUM_READ_AT_ONCE])
            yield from zip(images.keys.to_pylist(), read_contents(store, images), strict=True)


def first_images(config: TrainConfig, data: Dataset, most: int) -> FirstImages:
    """Return up to ``most`` images from the start of the first global batch, augmented, without unreadable ones."""
    # The number of workers matters only for a batch size such as 32/worker; "auto" counts as one worker. Loads that
    # --worker-load gives them change no global batch, so they are left out.
    workers = config.workers if isinstance(config.workers, int) else 1
    resolved = replace(config, worker_load=None).resolve(
        name="look", num_workers=workers, device="cpu", mean=data.mean, std=data.std
    )
    plan = data.plan(resolved)
    draws = plan.batch_draws(plan.batch(0))
    if not (config.mixup or config.cutmix):
        batch = _batch(resolved, data, draws[:most])
        return _shown(resolved, batch, data.train.classes, slice(batch.num_used))

    # Each image of a global batch is mixed with the one before it, and the first one with the last. So read the last
    # image, and the first ones after it; the last one itself is not shown.
    draws = np.roll(draws, 1)[: most + 1]
    batch = _batch(resolved, data, draws)
    mixing = {"mixup": config.mixup, "cutmix": config.cutmix, "label_sets": _label_sets(data)}
    mixed = mix_batch(batch, len(data.train.classes), config.seed, **mixing)
    return _shown(resolved, mixed, data.train.classes, slice(1, batch.num_used))


def _batch(config: ResolvedConfig, data: Dataset, draws: Int64s) -> Batch:
    """Return the images of ``draws``, (n,), without unreadable ones, augmented as in the first step of a run.

    They are decoded in a process of its own, which a file may crash.
    """
    plan = data.plan(config)
    shape, cropping, _ = data.train_format  # images are decoded here, even with --decoder gpu
    with ImageReader(data.train_store, shape, cropping, isolated=True) as reader:
        block, _ = reader.read_draws(data.train, draws, epoch=0)
    readable = block.labels >= 0
    images, labels, draws = block.images[readable], block.labels[readable], draws[readable]
    samples = samples_of(draws, plan.num_samples)
    local = LocalBatch(plan.batch(0), images, labels, samples, draws, (len(draws),))

    # Transforms of the user's own replace the crops of raytrain's augmentation.
    users_transforms = load_optional("--transforms", config.transforms)
    if users_transforms is not None:
        local = replace(local, images=UserTransforms(config, users_transforms)(images, draws, epoch=0))
    augment = Augment(config, crops=users_transforms is None)
    return to_batch(local, augment, torch.device("cpu"), training=True, label_sets=_label_sets(data))


def _label_sets(data: Dataset) -> Tensor | None:
    """Return which classes belong to each label, (K, C); None if a label is a class."""
    return None if data.train.label_sets is None else torch.from_numpy(data.train.label_sets)


def _shown(config: ResolvedConfig, batch: Batch, classes: tuple[str, ...], rows: slice) -> FirstImages:
    """Return the images of the batch in ``rows`` as pixels for a screen, and their targets as texts."""
    labels: list[str] = []
    for target in batch.targets[rows]:
        if not target.ndim:  # the number of a class
            labels.append(classes[int(target)])
            continue
        # (C,): the likeliest class first, with its probability if images are mixed.
        shares = [(classes[label], float(target[label])) for label in target.argsort(descending=True).tolist()]
        labels.append(", ".join(name if share == 1 else f"{share:.0%} {name}" for name, share in shares if share > 0))
    return FirstImages(screen_pixels(batch.images[rows], config, _MAX_SIDE), tuple(labels))
