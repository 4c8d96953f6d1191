"""Options of the network: the model, its weights, the images that it takes, and how it computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from raytrain.config.values import PositiveInt
from raytrain.errors import UsageError, flag

if TYPE_CHECKING:
    from raytrain.config.options import TrainConfig

Size = tuple[int, int]
"""Height and width in pixels."""

Precision = Literal["float32", "tf32", "bfloat16", "float16", "float64"]
ImageSize = tuple[PositiveInt, PositiveInt]
Resize = Literal["stretch", "crop", "pad"]
CropFraction = Annotated[float, Interval(gt=0, le=1)]
Interpolation = Literal["bilinear", "bicubic"]
Resizer = Literal["pillow", "cykooz"]

DEFAULT_SIZE: Size = (224, 224)

_FULL_AFTER = 0.8  # of the epochs; the others fit the network to the size that it is used with
_MULTIPLE = 4  # of so many pixels, which networks halve without a remainder


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network and the images that it takes."""

    model: str = "resnet18"
    """Name of a torchvision model, timm:NAME, or file.py:function, which may take num_classes and channels."""
    weights: str | None = None
    """Initial weights: DEFAULT (the library's), a file, s3:// object or hf://owner/name, or a checkpoint of a run."""
    freeze: tuple[str, ...] = ()
    """Layers to freeze, batch norm statistics included, by name, such as layer1; all: all but the head."""
    image_size: Annotated[ImageSize | str | None, "H W|SIDE|MIN..MAX"] = None
    """In pixels; by default as timm's weights want it, or 224 224. 128..224: grows over the epochs."""
    channels: Literal[1, 3] = 3
    """1 reads the images as grey, 3 as RGB."""
    resize: Resize | None = None
    """stretch (mostly the default) distorts an image to --image-size; crop shows its centre; pad puts it on black."""
    crop_fraction: CropFraction | None = None
    """crop: fraction of the shorter side of an image that is seen; by default as timm's weights want it, or 0.875."""
    interpolation: Interpolation | None = None
    """How pixels are computed if an image is resized; by default as timm's weights want it, or bilinear."""
    resizer: Literal["auto", Resizer] = "auto"
    """Library that resizes JPEGs for training, bilinearly. auto: cykooz-resizer if all nodes have it, else Pillow,
    which is slower; pixels differ by up to 1 of 255. Other images, such as those for testing, are resized by Pillow."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel to subtract, in 0..1; by default as timm's weights want it, or of the training images."""
    std: tuple[Annotated[float, Interval(gt=0)], ...] | None = None
    """Standard deviation of each channel to divide by, in 0..1; by default as --mean."""
    precision: Literal["auto", Precision] = "auto"
    """auto: bfloat16 if all devices compute it natively, else float32. 16 bits are mixed: the weights stay float32.
    tf32: float32, with products that NVIDIA's GPUs since Ampere compute faster, from rounded factors."""
    batch_norm: Literal["sync", "aggregate"] = "sync"
    """sync normalises with the global batch; aggregate with each local batch, and combines the running statistics."""
    channels_last: bool = False
    """Store images and weights in channels-last memory format, which is faster on most hardware."""
    compile: bool = False
    """Compile the network with torch.compile."""
    gradient_checkpointing: bool = False
    """Compute parts of the network twice, to need less memory."""

    @property
    def full_image_size(self) -> ImageSize:
        """The height and width for which the network is trained, also if training starts with smaller images."""
        return first_and_full_size(self.image_size or DEFAULT_SIZE)[1]


def check_network(config: TrainConfig) -> None:
    """Raise UsageError if images cannot have this size, or these channels."""
    if isinstance(config.image_size, str):
        _check_growing(config.image_size, config.epochs)
    for name in ("mean", "std"):
        value = getattr(config, name)
        if value is not None and len(value) != config.channels:
            raise UsageError(
                f"{flag(name)} has {len(value)} numbers for {config.channels} channels; give one number per channel."
            )


def timm_name(model: str | None) -> str | None:
    """The name within timm that follows ``timm:``, such as ``resnet50.a1_in1k``; None if ``model`` is not timm's."""
    library, colon, name = (model or "").partition(":")
    return name if colon and library == "timm" else None


def first_and_full_size(image_size: Size | str) -> tuple[Size, Size]:
    """The size of training images in the first epoch, and in the last ones and for all other images."""
    if not isinstance(image_size, str):
        return image_size, image_size
    first, _, full = image_size.partition("..")
    return (int(first), int(first)), (int(full), int(full))


def training_size(image_size: Size | str, epoch: int, epochs: int) -> Size:
    """The size of training images in ``epoch``, counted from 0, of so many ``epochs``.

    It grows linearly, in multiples of four pixels, and is the full one in the last fifth of the epochs, at least in the
    last one.
    """
    first, full = first_and_full_size(image_size)
    fraction = epoch / max(1, int(_FULL_AFTER * epochs))
    if first == full or fraction >= 1:
        return full
    height, width = (
        side + int(fraction * (end - side)) // _MULTIPLE * _MULTIPLE for side, end in zip(first, full, strict=True)
    )
    return height, width


def _check_growing(image_size: str, epochs: int) -> None:
    if not re.fullmatch(r"[1-9]\d*\.\.[1-9]\d*", image_size):
        raise UsageError(
            f"--image-size is {image_size!r}; give a side, such as 224, height and width, or a range for images that "
            "grow from epoch to epoch, such as 128..224."
        )
    (first, _), (full, _) = first_and_full_size(image_size)
    if first >= full or epochs == 1:
        raise UsageError(
            f"--image-size is {image_size} and --epochs {epochs}; a range starts with the smaller size, and needs at "
            "least two epochs to grow in."
        )
