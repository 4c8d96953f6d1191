"""Options of the data: images, labels, the split into training and test images, and where images are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from raytrain.config.limits import Fraction, PositiveFloat, PositiveInt
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
    """Label file: a .csv or .parquet file, also in a bucket, with a row per image; its column split, if any, splits."""
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
        if getattr(config, name) not in (None, ()) and config.labels is None:
            raise UsageError(f"{flag(name)} is for the label file; give that with --labels.")
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
