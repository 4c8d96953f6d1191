"""Options of the augmentation: how training images are changed and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from raytrain.config.limits import Fraction, NonNegativeFloat, NonNegativeInt
from raytrain.config.network import first_and_full_size
from raytrain.errors import UsageError

if TYPE_CHECKING:
    from raytrain.config.options import TrainConfig


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
    """Your own torchvision.transforms.v2: file.py:function or package.module:function, which returns them."""

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
