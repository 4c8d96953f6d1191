"""Augmentation on the device: flips, shifts, crops, and torchvision's transforms with random numbers per image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.network import Size, first_and_full_size, training_size
from raytrain.config.user_code import in_one_sentence
from raytrain.data.dataset import training_format
from raytrain.data.images.crop_box import crop_boxes, crop_numbers
from raytrain.data.plan.permutation import Floats, Int64s, mix, uniform
from raytrain.errors import UsageError
from raytrain.training.random_numbers import held_generators, kept_generators, seed_each, seed_generators

_FLIP, _DOWN, _RIGHT, _NUMBERS_PER_IMAGE = range(4)  # columns of an image's random numbers, and their count
_NUM_TRIED = 8  # images
_UNSEEDED = (
    "--transforms {name} makes different images of the same one, although all random number generators that are found "
    "are seeded alike: the run depends on the number of workers, and goes on differently after a resume; draw from "
    "those of torch, NumPy or Python's random, or keep your own as an attribute"
)


class Augment:
    """Turns images, uint8 (B, H, W, C) with B at least 1, into the network's input (B, C, *size).

    Images are resized, augmented for training, with ``transforms`` too, and normalised. The size depends on the epoch
    if ``--image-size`` says so. The result is float32 (float64 with that precision), in the configured memory format,
    on the device of the images.

    The random numbers of an image depend only on the seed, the epoch and the draw. So an image looks the same in any
    batch, on any worker or device, and after a resume.
    """

    def __init__(self, config: ResolvedConfig, transforms: Transforms | None = None) -> None:
        self.config = config
        self.transforms = transforms
        self.own_generators = [] if transforms is None else held_generators(transforms)
        self.source_shape = (*training_format(config).shape.size, config.channels)
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        by_channel = torch.tensor([config.mean, config.std], dtype=torch.float64)[:, :, None, None]  # (2, C, 1, 1)
        self.scale = (1 / (255 * by_channel[1])).to(self.dtype)  # x·scale + shift = (x/255 - mean) / std
        self.shift = (-by_channel[0] / by_channel[1]).to(self.dtype)

    def train(self, images: Tensor, draws: Int64s, epoch: int) -> Tensor:
        """Augment and normalise the images of ``draws``, int64 (B,), for ``epoch``."""
        seed = self.config.seed
        pixels = images.permute(0, 3, 1, 2)  # (B, C, H, W)

        # Whole images in a cache are cropped here, others where they are decoded.
        if self.config.cache_side is not None:
            pixels = _crop(pixels.to(self.dtype), crop_numbers(seed, epoch, draws), self.config)
        pixels = self._resize(pixels, training_size(self.config.image_size, epoch, self.config.epochs))

        # torchvision's transforms and those of the user take bytes, and draw on the host for each image.
        if self.transforms is not None:
            pixels = pixels.round().to(torch.uint8)  # no change if they are already
            named = self.config.transforms
            subject = "The augmentation" if named is None else f"--transforms {named}"
            with in_one_sentence(f"{subject} cannot be applied to {_kind(pixels[0])}"):
                pixels = transform_each(self.transforms, pixels, draws, seed, epoch, self.own_generators)

        # Flips and shifts are one gather on the device for the whole batch.
        if self.config.flip == "none" and not self.config.translate:
            return self._normalise(pixels)
        numbers = uniform(mix(seed, epoch), draws, _NUMBERS_PER_IMAGE)
        if self.config.flip == "alternating":  # below 0.5 in every second epoch (Jordan 2024)
            numbers[:, _FLIP] = (uniform(mix(seed), draws, _NUMBERS_PER_IMAGE)[:, _FLIP] + epoch / 2) % 1
        on_device = torch.from_numpy(numbers).to(pixels.device, non_blocking=True)  # otherwise the host waits for a GPU
        return self._normalise(*self._flip_and_shift(pixels, on_device))

    def notes(self, device: torch.device) -> list[str]:
        """Return a sentence if the user's transforms change an image in two ways although their generators are seeded.

        They are tried on noise, on ``device``.
        """
        if self.config.transforms is None:
            return []
        noise = np.random.default_rng(0).integers(0, 256, (_NUM_TRIED, *self.source_shape), np.uint8)
        images = torch.from_numpy(noise).to(device)
        first, second = (self.train(images, np.arange(_NUM_TRIED), 0) for _ in range(2))
        return [] if torch.equal(first, second) else [_UNSEEDED.format(name=self.config.transforms)]

    def evaluate(self, images: Tensor) -> Tensor:
        """Resize and normalise the images."""
        return self._normalise(self._resize(images.permute(0, 3, 1, 2), self.config.full_image_size))

    def _resize(self, pixels: Tensor, size: Size) -> Tensor:
        if pixels.shape[2:] == size:
            return pixels
        mode = self.config.interpolation
        return F.interpolate(pixels.to(self.dtype), size, mode=mode, antialias=True).clamp(0, 255)

    def _flip_and_shift(self, pixels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Flip and shift ``pixels``, (B, C, H, W), as the random ``numbers``, (B, 3), choose, and keep their dtype.

        Return also a mask, bool (B, 1, H, W), of the pixels that come from inside the image.
        """
        height, width = pixels.shape[2:]
        reach = self.config.translate
        shifts = (numbers[:, _DOWN : _RIGHT + 1] * (2 * reach + 1)).long() - reach  # (B, 2), uniform in -reach..reach
        y = torch.arange(height, device=pixels.device) - shifts[:, :1]  # (B, H): source row
        x = torch.arange(width, device=pixels.device) - shifts[:, 1:]  # (B, W): source column
        inside = _within(y, height)[:, None, :, None] & _within(x, width)[:, None, None, :]
        if self.config.flip != "none":
            x = torch.where(numbers[:, _FLIP, None] < 0.5, width - 1 - x, x)
        source = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]  # (B, H, W)
        source = source.flatten(1)[:, None].expand(-1, pixels.shape[1], -1)  # one gather per plane is the fastest
        return pixels.flatten(2).gather(2, source).view(pixels.shape), inside

    def _normalise(self, pixels: Tensor, inside: Tensor | None = None) -> Tensor:
        """Convert to the network's dtype and memory format; pixels that are not ``inside`` become 0."""
        self.scale, self.shift = self.scale.to(pixels.device), self.shift.to(pixels.device)
        planes = (
            pixels.to(self.dtype, memory_format=torch.contiguous_format, copy=True).mul_(self.scale).add_(self.shift)
        )
        if inside is not None:
            planes.mul_(inside)
        return planes.contiguous(memory_format=self.memory_format)  # last: broadcasting over three channels is slow


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _crop(pixels: Tensor, numbers: Floats, config: ResolvedConfig) -> Tensor:
    """Crop the box that ``numbers`` (B, 4) choose from each image (B, C, H, W), and resize it to the image size."""
    height, width = pixels.shape[2:]
    left, top, right, bottom = crop_boxes((height, width), numbers).T  # (B,) each
    zero = np.zeros_like(left)
    across = [(right - left) / width, zero, (left + right) / width - 1]  # -1 and 1 are the edges of the image
    down = [zero, (bottom - top) / height, (top + bottom) / height - 1]
    boxes = torch.from_numpy(np.stack([across, down]).transpose(2, 0, 1)).to(pixels, non_blocking=True)  # (B, 2, 3)
    grid = F.affine_grid(boxes, [*pixels.shape[:2], *config.full_image_size], align_corners=False)
    crops = F.grid_sample(pixels, grid, mode=config.interpolation, padding_mode="border", align_corners=False)
    return crops.clamp(0, 255)  # bicubic goes beyond


Transforms = Callable[[Tensor], Tensor]
"""One or several transforms of ``torchvision.transforms.v2``: uint8 (C, H, W) -> uint8 of the same shape."""

_KEY = 2  # keeps these random numbers apart from those of other augmentation
_BLUR_SIGMA = (0.1, 2.0)  # pixels


def build_transforms(config: ResolvedConfig, own: Callable[[], Any] | None = None) -> Transforms | None:
    """Return the transforms that the options name, in the order in which they are applied; None if they name none.

    ``own``, which ``--transforms`` names, makes the user's, one or a list, or is one itself. They come first. Pixels
    that a transform uncovers get the mean colour, which is 0 after normalisation. Raises UsageError if ``own`` is
    anything else.
    """
    chain = [] if own is None else _own_transforms(config, own)
    named = (config.auto_augment, config.color_jitter, config.rotation, config.blur, config.random_erasing)
    if not any(named) and len(chain) < 2:
        return chain[0] if chain else None
    from torchvision.transforms import v2  # deferred: the import takes seconds

    fill: Any = [round(255 * mean) for mean in config.mean]  # torchvision says float, and takes one for each channel
    bilinear = v2.InterpolationMode.BILINEAR
    if config.auto_augment is not None:
        kind = v2.RandAugment if config.auto_augment == "randaugment" else v2.TrivialAugmentWide
        chain.append(kind(interpolation=bilinear, fill=fill))
    if config.rotation:
        chain.append(v2.RandomRotation([-config.rotation, config.rotation], interpolation=bilinear, fill=fill))
    if config.color_jitter:
        chain.append(v2.ColorJitter(*[config.color_jitter] * 3))
    if config.blur:
        smallest_image, _ = first_and_full_size(config.image_size)
        largest = min(smallest_image) // 10 * 2 + 1  # a fifth of the image, odd
        chain.append(v2.RandomApply([v2.GaussianBlur(largest, _BLUR_SIGMA)], config.blur))
    if config.random_erasing:
        chain.append(v2.RandomErasing(config.random_erasing, value=fill))
    return v2.Compose(chain)


def _own_transforms(config: ResolvedConfig, own: Callable[..., Any]) -> list[Any]:
    """Return the user's transforms, which ``own`` makes. Raises UsageError if something in them is none."""
    with in_one_sentence(f"--transforms {config.transforms} cannot be made"):
        # A transform of torchvision, or a function that needs an argument, makes none: it is one.
        parameters = signature(own).parameters.values()
        needed = [each for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD]
        made = own if isinstance(own, torch.nn.Module) or needed else own()
    chain = list(made) if isinstance(made, (list, tuple)) else [made]
    if unfit := [transform for transform in chain if not callable(transform)]:
        raise UsageError(
            f"--transforms {config.transforms} returns {unfit[0]!r:.50}, which is no transform; return a function of "
            "an image, uint8 (C, H, W), such as one of torchvision.transforms.v2, or a list of them."
        )
    return chain


def transform_each(
    transforms: Transforms, images: Tensor, draws: Int64s, seed: int, epoch: int, generators: Sequence[Any] = ()
) -> Tensor:
    """Apply ``transforms`` to each of ``images``, uint8 (B, C, H, W), which show ``draws``, int64 (B,).

    The random numbers of torch, NumPy and Python, and of the ``generators`` that the transforms hold, depend on
    ``seed``, ``epoch`` and the draw alone while an image is transformed, so that it looks the same in any batch and
    on any worker. Afterwards those of the libraries continue as before. Raises UsageError if a transform changes an
    image's shape or type.
    """
    transformed: list[Tensor] = []
    with kept_generators(images.device):
        for image, draw in zip(images, draws.tolist(), strict=True):
            key = mix(seed, epoch, _KEY, draw)
            seed_generators(key, image.device)
            seed_each(generators, key)
            result: object = transforms(image)
            if not isinstance(result, Tensor) or result.shape != image.shape or result.dtype != image.dtype:
                raise UsageError(
                    f"--transforms made an image of {_kind(image)} into one of {_kind(result)}; transforms must keep "
                    "both: images are resized before them, and normalised after them."
                )
            transformed.append(result)
    return torch.stack(transformed)


def _kind(image: object) -> str:
    """Return the type of ``image`` as text, such as uint8 (3, 32, 32)."""
    if not isinstance(image, Tensor):
        return f"type {type(image).__module__}.{type(image).__qualname__}"
    return f"{str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}"
