"""Options of the data, and of the augmentation: how training images are changed and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from raytrain.config.marks import Mark
from raytrain.config.values import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from raytrain.errors import UsageError, flag


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Images and their labels."""

    data: Annotated[str, Mark.COMMON, Mark.SHARED_PLACE] = ""
    """Training images: a folder or a URL (s3://…, gs://…, az://…), with one folder per class, or any with --labels."""
    test_data: Annotated[str | None, Mark.COMMON, Mark.SHARED_PLACE] = None
    """Test images, in the same layout. Without it, --test-fraction of --data is held out."""
    test_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    """Fraction of each class that is held out for testing if --test-data is not given."""
    labels: Annotated[str | None, Mark.COMMON, Mark.SHARED_PLACE] = None
    """Label file (.csv, .tsv, .txt, .json, .jsonl, .parquet), also in a bucket: rows of images; column split splits."""
    test_labels: Annotated[str | None, Mark.SHARED_PLACE] = None
    """Label file of the images to test on, if --labels has none of them; those are below --test-data, or --data."""
    key_column: str | None = None
    """Column of --labels with the path of the image below --data; by default key, path, file_name, file or image."""
    label_column: tuple[str, ...] = ()
    """Column of --labels with the class; by default label, class, target or category. Several: classes, each 0 or 1."""
    label_separator: str | None = None
    """Separates the classes in the column of --labels if an image may have several, or none, such as |."""
    group_by: str | None = None
    """Column of --labels, such as patient: images that share a value are not divided over training and test images."""
    sampling: Annotated[Literal["uniform", "balanced"], Mark.SWEEPABLE] = "uniform"
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
        """True if an image may have several classes, or none."""
        return self.label_separator is not None or len(self.label_column) > 1


def check_data(options: DataOptions) -> None:
    """Raise UsageError if options of labels do not fit together."""
    # Options about a label file are a mistake without one.
    for name in ("key_column", "label_column", "label_separator", "group_by"):
        if getattr(options, name) not in (None, ()) and options.labels is None and options.test_labels is None:
            raise UsageError(f"{flag(name)} is for the label file; give that with --labels.")
    if options.group_by is not None and options.labels is None:
        raise UsageError("--group-by is for the label file of the training images; give that with --labels.")
    if options.test_labels is not None and options.labels is None and options.test_data is None:
        raise UsageError(
            "--test-labels says which images are tested on, and nothing which are trained on; give --labels or "
            "--test-data, too."
        )
    # Several classes of an image are either in one column, separated, or in one column each.
    if options.label_separator is not None and len(options.label_column) > 1:
        raise UsageError(
            "--label-separator is for one column with several classes; name one --label-column, or omit it."
        )
    if options.label_separator == "":
        raise UsageError("--label-separator is empty; give the text between two classes, such as |.")


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """Random changes of training images."""

    flip: Annotated[Literal["none", "random", "alternating"], Mark.COMMON, Mark.SWEEPABLE] = "none"
    """random mirrors half of the training images; alternating half of them in the first epoch, then the other half."""
    translate: Annotated[NonNegativeInt, Mark.SWEEPABLE] = 0
    """Shift training images by up to this many pixels in each direction; the gap is 0 after normalisation."""
    random_resized_crop: bool = False
    """Train on random crops (8 % to 100 % of the area) of the original images, resized to --image-size."""
    cache_side: Annotated[float, Interval(ge=1)] | None = None
    """Cut random crops from images kept at this many times --image-size, such as 1.15, not from the originals."""
    auto_augment: Literal["randaugment", "trivialaugment"] | None = None
    """Train on images changed by two random operations of RandAugment, or by one of TrivialAugment."""
    color_jitter: Annotated[Fraction, Mark.SWEEPABLE] = 0.0
    """Change brightness, contrast and saturation of training images by up to this fraction."""
    rotation: Annotated[float, Interval(ge=0, le=180), Mark.SWEEPABLE] = 0.0
    """Rotate training images by up to this many degrees in either direction."""
    blur: Annotated[Fraction, Mark.SWEEPABLE] = 0.0
    """Fraction of the training images that are blurred, by a Gaussian of 0.1 to 2 pixels."""
    random_erasing: Annotated[Fraction, Mark.SWEEPABLE] = 0.0
    """Fraction of the training images of which a random box is replaced by the mean colour."""
    mixup: Annotated[NonNegativeFloat, Mark.SWEEPABLE] = 0.0
    """Mixup alpha, such as 0.2; 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, Mark.SWEEPABLE] = 0.0
    """CutMix alpha, such as 1; 0 turns it off."""
    transforms: Annotated[str | None, Mark.OWN_CODE] = None
    """Your own torchvision.transforms.v2: file.py:function or package.module:function, which returns one or a list."""

    @property
    def crops_originals(self) -> bool:
        """True if each epoch decodes other parts of the original images, so that decoded images cannot be kept."""
        return self.random_resized_crop and self.cache_side is None


def check_augmentation(options: AugmentationOptions) -> None:
    """Raise UsageError if there is a size for random crops, but there are no random crops."""
    if options.cache_side is not None and not options.random_resized_crop:
        raise UsageError(
            f"--cache-side is {options.cache_side:g}, and only random crops use it; add --random-resized-crop, or omit "
            "--cache-side."
        )
