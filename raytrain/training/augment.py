"""Resize, augment and normalise images, a whole batch at a time on the device, with random numbers per sample."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.network import Size, training_size
from raytrain.data.dataset import training_format
from raytrain.data.framing import crop_boxes, crop_draws
from raytrain.data.permutation import Int64s, mix
from raytrain.data.random_numbers import Floats, uniform
from raytrain.training.transforms import Transforms, transform_each

_FLIP, _DOWN, _RIGHT, _NUM_DRAWS = range(4)


class Augment:
    """Turns images, uint8 (B, H, W, C) with B at least 1, into the network's input (B, C, *size).

    Images are resized, augmented for training, with ``transforms`` too, and normalised. The size depends on the epoch
    if ``--image-size`` says so. The result is float32 (float64
    with that precision), in the configured memory format, on the device of the images.

    The random numbers of an image depend only on the seed, the epoch and the sample. So an image looks the same in any
    batch, on any worker or device, and after a resume.
    """

    def __init__(self, config: ResolvedConfig, transforms: Transforms | None = None) -> None:
        self.config = config
        self.transforms = transforms
        self.source_shape = (*training_format(config).shape.size, config.channels)
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        by_channel = torch.tensor([config.mean, config.std], dtype=torch.float64)[:, :, None, None]  # (2, C, 1, 1)
        self.scale = (1 / (255 * by_channel[1])).to(self.dtype)  # x·scale + shift = (x/255 - mean) / std
        self.shift = (-by_channel[0] / by_channel[1]).to(self.dtype)

    def train(self, images: Tensor, samples: Int64s, epoch: int) -> Tensor:
        """Augment and normalise the images of ``samples``, int64 (B,), for ``epoch``."""
        pixels = images.permute(0, 3, 1, 2)  # (B, C, H, W)
        if self.config.cache_side is not None:
            draws = crop_draws(self.config.seed, epoch, samples)
            pixels = _crop(pixels.to(self.dtype), draws, self.config)
        pixels = self._resize(pixels, training_size(self.config.image_size, epoch, self.config.epochs))
        if self.transforms is not None:
            pixels = pixels.round().to(torch.uint8)  # no change if they are already
            pixels = transform_each(self.transforms, pixels, samples, self.config.seed, epoch)
        if self.config.flip == "none" and not self.config.translate:
            return self._normalise(pixels)
        draws = torch.from_numpy(uniform(mix(self.config.seed, epoch), samples, _NUM_DRAWS)).to(pixels.device)
        if self.config.flip == "alternating":
            draws[:, _FLIP] = torch.from_numpy(_alternating_draws(self.config.seed, epoch, samples))
        return self._normalise(*self._flip_and_shift(pixels, draws))

    def evaluate(self, images: Tensor) -> Tensor:
        """Resize and normalise the images."""
        return self._normalise(self._resize(images.permute(0, 3, 1, 2), self.config.full_image_size))

    def _resize(self, pixels: Tensor, size: Size) -> Tensor:
        if pixels.shape[2:] == size:
            return pixels
        mode = self.config.interpolation
        return F.interpolate(pixels.to(self.dtype), size, mode=mode, antialias=True).clamp(0, 255)

    def _flip_and_shift(self, pixels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels, of the same dtype, and a mask, bool (B, 1, H, W), of those that come from inside the image."""
        height, width = pixels.shape[2:]
        reach = self.config.translate
        shifts = (draws[:, (_DOWN, _RIGHT)] * (2 * reach + 1)).long() - reach  # (B, 2), uniform in -reach..reach
        y = torch.arange(height, device=pixels.device) - shifts[:, :1]  # (B, H): source row
        x = torch.arange(width, device=pixels.device) - shifts[:, 1:]  # (B, W): source column
        inside = _within(y, height)[:, None, :, None] & _within(x, width)[:, None, None, :]
        if self.config.flip != "none":
            x = torch.where(draws[:, _FLIP, None] < 0.5, width - 1 - x, x)
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


def _alternating_draws(seed: int, epoch: int, samples: Int64s) -> Floats:
    """Uniform random numbers, float64 (B,), of which each is below 0.5 in every second epoch (Jordan 2024)."""
    first = uniform(mix(seed), samples, _NUM_DRAWS)[:, _FLIP]
    return (first + epoch / 2) % 1


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _crop(pixels: Tensor, draws: Floats, config: ResolvedConfig) -> Tensor:
    """Crop the box that ``draws`` (B, 4) choose from each image (B, C, H, W), and resize it to the image size."""
    height, width = pixels.shape[2:]
    left, top, right, bottom = crop_boxes((height, width), draws).T  # (B,) each
    zero = np.zeros_like(left)
    across = [(right - left) / width, zero, (left + right) / width - 1]  # -1 and 1 are the edges of the image
    down = [zero, (bottom - top) / height, (top + bottom) / height - 1]
    boxes = torch.from_numpy(np.stack([across, down]).transpose(2, 0, 1)).to(pixels)  # (B, 2, 3)
    grid = F.affine_grid(boxes, [*pixels.shape[:2], *config.full_image_size], align_corners=False)
    crops = F.grid_sample(pixels, grid, mode=config.interpolation, padding_mode="border", align_corners=False)
    return crops.clamp(0, 255)  # bicubic goes beyond
