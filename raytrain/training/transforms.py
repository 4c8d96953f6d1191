"""torchvision's transforms for training, applied to each image with random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.network import first_and_full_size
from raytrain.data.permutation import Int64s, mix
from raytrain.errors import UsageError

if TYPE_CHECKING:
    from torchvision.transforms.v2 import Transform

Transforms = Callable[[Tensor], Tensor]
"""One or several transforms of ``torchvision.transforms.v2``: uint8 (C, H, W) -> uint8 of the same shape."""

_KEY = 2  # keeps these random numbers apart from those of other augmentation
_BLUR_SIGMA = (0.1, 2.0)  # pixels


def build_transforms(config: ResolvedConfig, own: Callable[[], Transforms] | None = None) -> Transforms | None:
    """The transforms that the options name, in the order in which they are applied; None if they name none.

    ``own``, the function that ``--transforms`` names, makes the user's, which come first. Pixels that a transform
    uncovers get the mean colour, which is 0 after normalisation.
    """
    wanted = (config.auto_augment, config.color_jitter, config.rotation, config.blur, config.random_erasing)
    if not any(wanted):
        return own and own()
    from torchvision.transforms import v2  # deferred: the import takes seconds

    chain = [*([own()] if own else []), *_geometry(config), *_colours(config)]
    if config.random_erasing:
        chain.append(v2.RandomErasing(config.random_erasing, value=_mean_colour(config)))
    return v2.Compose(chain)


def transform_each(transforms: Transforms, images: Tensor, samples: Int64s, seed: int, epoch: int) -> Tensor:
    """Apply ``transforms`` to each of ``images``, uint8 (B, C, H, W), whose indices are ``samples``, int64 (B,).

    torch's random numbers depend on ``seed``, ``epoch`` and the sample alone while an image is transformed, so that it
    looks the same in any batch and on any worker. Afterwards they continue as before. Raises UsageError if a transform
    changes an image's shape or type.
    """
    devices = [images.device] if images.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        keys = [mix(seed, epoch, _KEY, sample) for sample in samples.tolist()]
        return torch.stack([_transformed(transforms, image, key) for image, key in zip(images, keys, strict=True)])


def _transformed(transforms: Transforms, image: Tensor, key: int) -> Tensor:
    torch.default_generator.manual_seed(key >> 1)  # torch.manual_seed is slower, for it seeds all devices
    if image.device.type == "cuda":
        torch.cuda.manual_seed(key >> 1)
    result = transforms(image)
    if result.shape != image.shape or result.dtype != image.dtype:
        raise UsageError(
            f"--transforms made an image of {_kind(image)} into one of {_kind(result)}; transforms must keep both: "
            "images are resized before them, and normalised after them."
        )
    return result


def _kind(image: Tensor) -> str:
    return f"{str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}"


def _geometry(config: ResolvedConfig) -> list[Transform]:
    from torchvision.transforms import v2

    fill = _mean_colour(config)
    bilinear = v2.InterpolationMode.BILINEAR
    chain: list[Transform] = []
    if config.auto_augment is not None:
        kind = v2.RandAugment if config.auto_augment == "randaugment" else v2.TrivialAugmentWide
        chain.append(kind(interpolation=bilinear, fill=fill))
    if config.rotation:
        chain.append(v2.RandomRotation([-config.rotation, config.rotation], interpolation=bilinear, fill=fill))
    return chain


def _colours(config: ResolvedConfig) -> list[Transform]:
    from torchvision.transforms import v2

    chain: list[Transform] = []
    if config.color_jitter:
        chain.append(v2.ColorJitter(*[config.color_jitter] * 3))
    if config.blur:
        smallest_image, _ = first_and_full_size(config.image_size)
        largest = min(smallest_image) // 10 * 2 + 1  # a fifth of the image, odd
        chain.append(v2.RandomApply([v2.GaussianBlur(largest, _BLUR_SIGMA)], config.blur))
    return chain


def _mean_colour(config: ResolvedConfig) -> Any:  # torchvision says float, and takes a number for each channel
    return [round(255 * mean) for mean in config.mean]
