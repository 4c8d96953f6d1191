"""Options of the data, and of the augmentation: how training images are changed and mixed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from annotated_types import Interval

from raytrain.config.option_marks import KnownAs, Mark
from raytrain.config.option_values import (
    LOCATION,
    OPTIONAL_LOCATION,
    TEXTS,
    Accepts,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    option_field,
    section,
)
from raytrain.errors import UsageError, did_you_mean, flag

_POLICIES = ("randaugment", "trivialaugment", "augmix", "3-augment")


@section
class DataOptions:
    """Images and their labels."""

    data: Annotated[str, Mark.COMMON, Mark.SHARED_PLACE, KnownAs("data-dir dataset train train-data root")] = (
        option_field(default="", converter=LOCATION)
    )
    """Training images: a folder or URL (s3://…, gs://…, az://…). Its folders are the classes, or --labels says them."""
    validation_data: Annotated[
        str | None, Mark.COMMON, Mark.SHARED_PLACE, KnownAs("val valid val-data val-dir valid-dir")
    ] = option_field(default=None, converter=OPTIONAL_LOCATION)
    """Images to measure each epoch, which choose the best checkpoint; by default those in val/ or test/ of --data."""
    validation_fraction: Annotated[
        float | None, Interval(gt=0, lt=1), KnownAs("val-split validation-split test-split test-fraction test-size")
    ] = None
    """Fraction of each class that is held out for validation; by default 0.1 if no images are given for it."""
    validation_fold: Annotated[str | None, "K/N", Mark.SWEEPABLE] = option_field(
        default=None, converter=Accepts[str | Sequence[int] | None, str | None]()
    )
    """Validate on the K-th of N equal parts of each class, such as 2/5; `raytrain sweep --folds 5` tries all."""
    test_data: Annotated[str | None, Mark.COMMON, Mark.SHARED_PLACE, KnownAs("test test-dir")] = option_field(
        default=None, converter=OPTIONAL_LOCATION
    )
    """Images to measure once, at the end; without other images for validation, they are for validation instead."""
    labels: Annotated[str | None, Mark.COMMON, Mark.SHARED_PLACE] = option_field(
        default=None, converter=OPTIONAL_LOCATION
    )
    """Label file (.csv, .tsv, .txt, .json, .jsonl, .parquet) or its URL: a row per image, its part in column split."""
    validation_labels: Annotated[str | None, Mark.SHARED_PLACE] = option_field(
        default=None, converter=OPTIONAL_LOCATION
    )
    """Label file of the validation images, which are below --validation-data, or else below --data."""
    test_labels: Annotated[str | None, Mark.SHARED_PLACE] = option_field(default=None, converter=OPTIONAL_LOCATION)
    """Label file of the test images, which are below --test-data, or else below --data."""
    label_pattern: str | None = None
    """Regular expression whose group label is the class in the name of a file, such as (?P<label>.+)_[0-9]+[.]jpg."""
    key_column: str | None = None
    """Column of --labels with an image's path; by default key, path, file_name, filename, file or image."""
    label_column: tuple[str, ...] = option_field(default=(), converter=TEXTS)
    """Column of --labels with the class; by default label, class, target, category. Several: one per class, 0 or 1."""
    label_separator: str | None = None
    """Separates the classes in the column of --labels if an image may have several, or none, such as |."""
    group_by: str | None = None
    """Column of --labels, such as patient: images that share a value are all held out, or none is."""
    sampling: Annotated[Literal["uniform", "balanced"], Mark.SWEEPABLE] = "uniform"
    """balanced draws every class equally often: rare classes repeat in an epoch, images of common ones are left out."""
    max_bad_fraction: Fraction = 0.01
    """Bad images are left out and listed; the run fails if more than this fraction cannot be read (0: at the first)."""
    cache: Literal["auto", "memory", "disk", "none"] = "auto"
    """memory keeps decoded images; disk keeps a bucket's files on each machine; auto: what fits; none: neither."""
    cache_folder: str | None = option_field(default=None, converter=OPTIONAL_LOCATION)
    """Where --cache disk keeps files on each machine; by default raytrain-cache-UID in the temporary folder."""
    cache_limit_gb: Annotated[float, Interval(gt=0, le=1e9)] | None = None
    """Gigabytes that --cache disk takes at most on each machine; by default half of what is free there."""
    prefetch: PositiveInt = 2
    """Batches that each worker prepares ahead of the loop."""

    @property
    def fold(self) -> tuple[int, int] | None:
        """K, counted from 1, and N of ``validation_fold``: (2, 5) for ``2/5``; None without it."""
        if self.validation_fold is None:
            return None
        number, _, num_folds = self.validation_fold.partition("/")
        return int(number), int(num_folds)

    @property
    def multi_label(self) -> bool:
        """True if an image may have several classes, or none."""
        return self.label_separator is not None or len(self.label_column) > 1


def check_data(options: DataOptions) -> None:
    """Raise UsageError if options of labels or of held-out images do not fit together, or one of them is malformed."""
    # Options about a label file are a mistake without one. Two of them also apply to what a pattern finds in names.
    label_files = (options.labels, options.validation_labels, options.test_labels)
    for name in ("key_column", "label_column", "label_separator", "group_by"):
        is_given = getattr(options, name) not in (None, ())
        applies_to_pattern = options.label_pattern is not None and name in ("label_separator", "group_by")
        if is_given and label_files == (None, None, None) and not applies_to_pattern:
            raise UsageError(f"{flag(name)} is for the label file; give that with --labels.")
    if options.label_pattern is not None:
        _check_options_beside_pattern(options, options.label_pattern)
    elif options.group_by is not None and options.labels is None:
        raise UsageError("--group-by is for the label file of the training images; give that with --labels.")

    # A held-out part without images of its own is below --data: then nothing but --labels says what is trained on.
    for part in ("validation", "test"):
        labels, data = getattr(options, f"{part}_labels"), getattr(options, f"{part}_data")
        if labels is not None and options.labels is None and data is None:
            raise UsageError(
                f"--{part}-labels says which images are held out, and nothing which are trained on; give --labels or "
                f"--{part}-data, too."
            )

    # The validation images are given, or a fraction of the training images, or a fold of them.
    if options.validation_data is not None and options.validation_fraction is not None:
        raise UsageError("--validation-data and --validation-fraction both say what is for validation; give one.")
    if options.validation_fold is not None:
        match = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", options.validation_fold)
        is_fold = match is not None and int(match[2]) >= max(2, int(match[1]))
        if not is_fold:
            raise UsageError(
                f"--validation-fold is {options.validation_fold}; give the number of a fold and how many there are, at "
                "least two, such as 1/5."
            )
        for name in ("validation_data", "validation_labels", "validation_fraction"):
            if getattr(options, name) is not None:
                raise UsageError(f"--validation-fold and {flag(name)} both say what is for validation; give one.")

    # Several classes of an image are either in one column, separated, or in one column each.
    if options.label_separator is not None and len(options.label_column) > 1:
        raise UsageError(
            "--label-separator is for one column with several classes; name one --label-column, or omit it."
        )
    if options.label_separator == "":
        raise UsageError("--label-separator is empty; give the text between two classes, such as |.")


def check_label_pattern(pattern: str) -> re.Pattern[str]:
    """Return ``--label-pattern``, compiled; raise UsageError if it is no regular expression, or has no group.

    Example: ``check_label_pattern("(?P<label>.+)_[0-9]+[.]jpg")``
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--label-pattern is {pattern!r}, which is no regular expression ({error}).") from None
    if not expression.groups:
        raise UsageError(
            f"--label-pattern is {pattern!r}, which has no group that is the class; write one, such as (?P<label>.+)."
        )
    return expression


def _check_options_beside_pattern(options: DataOptions, pattern: str) -> None:
    """Raise UsageError if ``--label-pattern`` is malformed, or does not go with the other options of labels."""
    for name in ("labels", "validation_labels", "test_labels"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--label-pattern and {flag(name)} both say the classes of the images; give one of them "
                "(--label-pattern none omits one that a run or a file of options has)."
            )
    expression = check_label_pattern(pattern)
    if options.group_by is not None and options.group_by not in expression.groupindex:
        raise UsageError(
            f"--group-by is {options.group_by}, and --label-pattern has no group of this name; write one, such as "
            f"(?P<{options.group_by}>.+)."
        )


class AutoAugment(NamedTuple):
    """A policy, with torchvision's magnitude (RandAugment 0 to 30, AugMix 1 to 10) and number of operations.

    The number of operations is that of one image, and only RandAugment has a choice of it. ``trivial`` and
    ``3-augment`` have no magnitude.
    """

    policy: Literal["rand", "trivial", "augmix", "3-augment"]
    magnitude: int = 0
    num_operations: int = 1

    @classmethod
    def parse(cls, text: str) -> AutoAugment:
        """Return the policy that ``text`` names; raise UsageError if it names none.

        Example: ``AutoAugment.parse("rand-m9-n2") == AutoAugment.parse("randaugment")``
        """
        if text in ("trivialaugment", "3-augment"):
            return cls("trivial" if text == "trivialaugment" else "3-augment")
        # Numbers that the text leaves out are torchvision's defaults.
        parts = re.fullmatch(r"randaugment|rand-m(\d+)(?:-n([1-9]))?", text)
        if parts and int(parts[1] or 9) <= 30:
            return cls("rand", int(parts[1] or 9), int(parts[2] or 2))
        parts = re.fullmatch(r"augmix(?:-m([1-9]\d*))?", text)
        if parts and int(parts[1] or 3) <= 10:
            return cls("augmix", int(parts[1] or 3))
        raise UsageError(
            f"--auto-augment is {text!r}{did_you_mean(text, _POLICIES)}; give randaugment, or rand-m9-n2 with a "
            "magnitude of 0 to 30 and 1 to 9 operations, trivialaugment, augmix, or augmix-m3 with a severity of 1 to "
            "10, or 3-augment."
        )


@section
class AugmentationOptions:
    """Random changes of training images."""

    flip: Annotated[
        Literal["none", "random", "alternating"], Mark.CHOSEN_BY_AUTO, Mark.COMMON, Mark.SWEEPABLE, KnownAs("hflip")
    ] = "none"
    """random mirrors half of the training images; alternating half of them in the first epoch, then the other half."""
    translate: Annotated[NonNegativeInt, Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE] = 0
    """Shift training images by up to this many pixels in each direction; the mean colour fills the gap."""
    random_resized_crop: bool = False
    """Train on random crops (8 % to 100 % of the area) of the original images, resized to --image-size."""
    cache_side: Annotated[float, Interval(ge=1)] | None = None
    """Cut random crops from images kept at this many times --image-size, such as 1.15, not from the originals."""
    auto_augment: Annotated[
        str | None, "randaugment|rand-mM-nN|trivialaugment|augmix|augmix-mM|3-augment", KnownAs("aa augment")
    ] = None
    """Random operations: RandAugment's (two, rand-m9-n2), one of TrivialAugment's, AugMix, or DeiT III's 3-Augment."""
    color_jitter: Annotated[Fraction, Mark.SWEEPABLE] = 0.0
    """Change brightness, contrast and saturation of training images by up to this fraction."""
    rotation: Annotated[float, Interval(ge=0, le=180), Mark.SWEEPABLE] = 0.0
    """Rotate training images by up to this many degrees in either direction."""
    blur: Annotated[Fraction, Mark.SWEEPABLE] = 0.0
    """Fraction of the training images that are blurred, by a Gaussian of 0.1 to 2 pixels."""
    random_erasing: Annotated[Fraction, Mark.SWEEPABLE, KnownAs("reprob")] = 0.0
    """Fraction of the training images of which a random box is replaced by the mean colour."""
    mixup: Annotated[NonNegativeFloat, Mark.SWEEPABLE] = 0.0
    """Mixup alpha, such as 0.2; 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, Mark.SWEEPABLE] = 0.0
    """CutMix alpha, such as 1; 0 turns it off."""
    transforms: Annotated[str | None, Mark.OWN_CODE] = None
    """Your own torchvision.transforms.v2: file.py:function or package.module:function, which returns one or a list."""

    @property
    def crops_originals(self) -> bool:
        """True if each epoch decodes other parts of the original images, so that decoded images cannot be cached."""
        return self.random_resized_crop and self.cache_side is None


def check_augmentation(options: AugmentationOptions) -> None:
    """Raise UsageError if ``auto_augment`` names no policy, or ``cache_side`` is given without random crops."""
    if options.auto_augment is not None:
        AutoAugment.parse(options.auto_augment)
    if options.cache_side is not None and not options.random_resized_crop:
        raise UsageError(
            f"--cache-side is {options.cache_side:g}, and only random crops use it; add --random-resized-crop, or omit "
            "--cache-side."
        )
