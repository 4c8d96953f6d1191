"""Options of the data, and of the augmentation: how training images are changed and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from raytrain.config.network import first_and_full_size
from raytrain.config.values import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from raytrain.errors import UsageError, flag

if TYPE_CHECKING:
    from raytrain.config.options import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Images and their labels."""

    data: str = ""
    """Training images: a folder or a URL (s3://…, gs://…, az://…), with one folder per class, or any with --labels."""
    test_data: str | None = None
    """Test images, in the same layout. Without it, --test-fraction of --data is held out."""
    test_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    """Fraction of each class that is held out for testing if --test-data is not given."""
    labels: str | None = None
    """Label file (.csv, .tsv, .txt, .json, .jsonl, .parquet), also in a bucket: rows of images; column split splits."""
    test_labels: str | None = None
    """Label file of the images to test on, if --labels has none of them; those are below --test-data, or --data."""
    key_column: str | None = None
    """Column of --labels with the path of the image below --data; by default key, path, file_name, file or image."""
    label_column: tuple[str, ...] = ()
    """Column of --labels with the class; by default label, class, target or category. Several: classes, each 0 or 1."""
    label_separator: str | None = None
    """Separates the classes in the column of --labels if an image may have several, or none, such as |."""
    group_by: str | None = None
    """Column of --labels, such as patient: images that share a value are not divided over training and test images."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """balanced draws every class equally often: rare classes repeat in an epoch, images of common ones are left out."""
    max_bad_fraction: Fraction = 0.01
    """Bad images are left out and listed; the run fails if more than this fraction cannot be read (0: at the first)."""
    cache: Literal["auto", "memory", "disk", "none"] = "auto"
    """memory keeps decoded images; disk keeps a bucket's files on each machine; auto: what fits; none: neither."""
    cache_folder: str | None = None
    """Where --cache disk keeps files on each machine; by default raytrain-cache-UID in the temporary folder."""
    cache_limit_gb: PositiveFloat | None = None
    """Most of the disk that --cache disk takes on each machine; by default half of what is free there."""
    prefetch: PositiveInt = 2
    """Batches that each worker prepares ahead of the loop."""

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several classes, or none."""
        return self.label_separator is not None or len(self.label_column) > 1


def check_data(config: TrainConfig) -> None:
    """Raise UsageError if options of labels do not fit together."""
    for name in ("key_column", "label_column", "label_separator", "group_by"):
        if getattr(config, name) not in (None, ()) and config.labels is None and config.test_labels is None:
            raise UsageError(f"{flag(name)} is for the label file; give that with --labels.")
    if config.group_by is not None and config.labels is None:
        raise UsageError("--group-by is for the label file of the training images; give that with --labels.")
    if config.test_labels is not None and config.labels is None and config.test_data is None:
        raise UsageError(
            "--test-labels says which images are tested on, and nothing which are trained on; give --labels or "
            "--test-data, too."
        )
    if config.label_separator is not None and len(config.label_column) > 1:
        raise UsageError(
            "--label-separator is for one column with several classes; name one --label-column, or omit it."
        )
    if config.label_separator == "":
        raise UsageError("--label-separator is empty; give the text between two classes, such as |.")
    unfit = {
        "--sampling balanced": config.sampling == "balanced",
        "--focal-gamma": config.focal_gamma > 0,
        "--label-smoothing": config.label_smoothing > 0,
    }
    for option, is_given in unfit.items():
        if is_given and config.multi_label:
            raise UsageError(f"{option} needs images of one class each, and here an image may have several; omit it.")


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """Random changes of training images."""

    flip: Literal["none", "random", "alternating"] = "none"
    """random mirrors half of the training images; alternating half of them in the first epoch, then the other half."""
    translate: NonNegativeInt = 0
    """Shift training images by up to this many pixels in each direction; the gap is 0 after normalisation."""
    random_resized_crop: bool = False
    """Train on random crops (8 % to 100 % of the area) of the original images, resized to --image-size."""
    cache_side: Annotated[float, Interval(ge=1)] | None = None
    """Cut random crops from images kept at this many times --image-size, such as 1.15, not from the originals."""
    auto_augment: Literal["randaugment", "trivialaugment"] | None = None
    """Train on images changed by two random operations of RandAugment, or by one of TrivialAugment."""
    color_jitter: Fraction = 0.0
    """Change brightness, contrast and saturation of training images by up to this fraction."""
    rotation: Annotated[float, Interval(ge=0, le=180)] = 0.0
    """Rotate training images by up to this many degrees in either direction."""
    blur: Fraction = 0.0
    """Fraction of the training images that are blurred, by a Gaussian of 0.1 to 2 pixels."""
    random_erasing: Fraction = 0.0
    """Fraction of the training images of which a random box is replaced by the mean colour."""
    mixup: NonNegativeFloat = 0.0
    """Mixup alpha, such as 0.2; 0 turns it off."""
    cutmix: NonNegativeFloat = 0.0
    """CutMix alpha, such as 1; 0 turns it off."""
    transforms: str | None = None
    """Your own torchvision.transforms.v2: file.py:function or package.module:function, which returns one or a list."""

    @property
    def crops_originals(self) -> bool:
        """Whether each epoch decodes other parts of the original images, so that decoded images cannot be kept."""
        return self.random_resized_crop and self.cache_side is None


def check_augmentation(config: TrainConfig) -> None:
    """Raise UsageError if images cannot be cropped or shifted like this."""
    if config.cache_side is not None and not config.random_resized_crop:
        raise UsageError(
            f"--cache-side is {config.cache_side:g}, and only random crops use it; add --random-resized-crop, or omit "
            "--cache-side."
        )
    if config.cache == "memory" and config.crops_originals:
        raise UsageError(
            "--cache is memory, and --random-resized-crop reads the original images in every epoch; add --cache-side "
            "1.15 to cut the crops from images in memory, or omit --cache memory."
        )
    if config.image_size is None:
        return
    height, width = first_and_full_size(config.image_size)[0]
    if config.translate >= min(height, width):
        raise UsageError(
            f"--translate is {config.translate}, and images have {height}x{width} pixels; it must be less than each "
            "side."
        )
