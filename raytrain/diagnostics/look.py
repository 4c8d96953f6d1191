"""A look at a data set before anything is trained on it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raytrain.backends.prepare import check_named
from raytrain.backends.preprocessing import with_preprocessing_of_weights
from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.diagnostics.duplicates import Duplicates, find_duplicates
from raytrain.diagnostics.image_sample import ImageSample, Range, sample_images
from raytrain.runs.documents import new_name, run_store

if TYPE_CHECKING:
    from raytrain.diagnostics.first_images import FirstImages

_NUM_SHOWN = 40
_SAMPLING_FRACTION = 0.5  # of the time; the rest is for duplicates


@dataclass(frozen=True)
class ClassCount:
    """How many images a class has."""

    name: str
    training: int
    test: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LookResult:
    """What a data set has: its classes, its files, and its first images as a network would see them."""

    title: str
    data: str
    test_data: str
    training_images: int
    test_images: int
    ignored_files: int
    classes: tuple[ClassCount, ...]
    size_bytes: Range | None
    """Of the files of the training images."""
    sample: ImageSample
    duplicates: Duplicates
    first_images: FirstImages

    def summary(self) -> dict[str, Any]:
        """The result as plain values, without the pixels."""
        plain = {name: value for name, value in vars(self).items() if name not in ("title", "first_images")}
        return {
            **plain,
            "classes": [asdict(each) for each in self.classes],
            "size_bytes": self.size_bytes and self.size_bytes._asdict(),
            "sample": self.sample.summary(),
            "duplicates": self.duplicates.summary(),
        }


def look_at(config: TrainConfig, *, limit_s: float = 30.0) -> LookResult:
    """Look at the images that a run with these options would be trained and tested on. Trains and writes nothing.

    Args:
        config: the options of the run.
        limit_s: seconds after which no more files are read; the result says how many were.

    Raises:
        UsageError, StorageError: the data cannot be read, or no run could start with it.
    """
    check_named(config)
    config = with_preprocessing_of_weights(config)
    name = (config.resume and config.name) or new_name(config.recipe)  # a run that resumes keeps its own images
    data = open_dataset(config, run_store(config.storage, name))
    started_s = time.monotonic()
    sample = sample_images(data, config.seed, started_s + _SAMPLING_FRACTION * limit_s)
    duplicates = find_duplicates(data, started_s + limit_s)
    from raytrain.diagnostics.first_images import first_images  # imports torch

    return LookResult(
        title=config.name or config.recipe,
        data=data.train.url,
        test_data=data.test.url,
        training_images=len(data.train),
        test_images=len(data.test),
        ignored_files=data.train.num_ignored,
        classes=_class_counts(data),
        size_bytes=Range.of(data.train.sizes_bytes.tolist()),
        sample=sample,
        duplicates=duplicates,
        first_images=first_images(config, data, _NUM_SHOWN),
    )


def _class_counts(data: Dataset) -> tuple[ClassCount, ...]:
    training, test = (manifest.class_counts().tolist() for manifest in (data.train, data.test))
    return tuple(map(ClassCount, data.train.classes, training, test))
