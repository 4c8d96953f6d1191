"""Resize, augment and normalise images, a whole batch at a time on the device, with random numbers per sample."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.permutation import mix

_FLIP, _DOWN, _RIGHT, _AREA, _ASPECT, _TOP, _LEFT, _NUM_DRAWS = range(8)
_LOG_ASPECT = math.log(4 / 3)


class Augment:
    """Turns images, uint8 (B, H, W, C) with B at least 1, into the network's input (B, C, *image_size).

    Images are resized, augmented (for training) and normalised. The result is float32 (float64 with that precision), in
    the configured memory format, on the device of the images.

    The random numbers of an image depend only on the seed, the epoch and the sample. So an image looks the same in any
    batch, on any worker or device, and after a resume.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.source_shape = (*config.image_size, config.channels)
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        by_channel = torch.tensor([config.mean, config.std], dtype=torch.float64)[:, :, None, None]  # (2, C, 1, 1)
        self.scale = (1 / (255 * by_channel[1])).to(self.dtype)  # x·scale + shift = (x/255 - mean) / std
        self.shift = (-by_channel[0] / by_channel[1]).to(self.dtype)

    def train(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """Augment and normalise the images of ``samples``, int64 (B,), for ``epoch``."""
        draws = uniform(mix(self.config.seed, epoch), samples, _NUM_DRAWS)  # (B, draws)
        pixels = images.permute(0, 3, 1, 2)  # (B, C, H, W)
        if self.config.random_resized_crop:
            pixels = _random_crop(pixels.to(self.dtype), draws, self.config.image_size)
        else:
            pixels = self._resize(pixels)
        if not (self.config.horizontal_flip or self.config.translate):
            return self._normalise(pixels)
        return self._normalise(*self._flip_and_shift(pixels, draws))

    def evaluate(self, images: Tensor) -> Tensor:
        """Resize and normalise the images."""
        return self._normalise(self._resize(images.permute(0, 3, 1, 2)))

    def _resize(self, pixels: Tensor) -> Tensor:
        if pixels.shape[2:] == self.config.image_size:
            return pixels
        return F.interpolate(pixels.to(self.dtype), self.config.image_size, mode="bilinear", antialias=True)

    def _flip_and_shift(self, pixels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels, of the same dtype, and a mask, bool (B, 1, H, W), of those that come from inside the image."""
        height, width = pixels.shape[2:]
        reach = self.config.translate
        shifts = (draws[:, (_DOWN, _RIGHT)] * (2 * reach + 1)).long() - reach  # (B, 2), uniform in -reach..reach
        y = torch.arange(height, device=pixels.device) - shifts[:, :1]  # (B, H): source row
        x = torch.arange(width, device=pixels.device) - shifts[:, 1:]  # (B, W): source column
        inside = _within(y, height)[:, None, :, None] & _within(x, width)[:, None, None, :]
        if self.config.horizontal_flip:
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


def uniform(key: int, samples: Tensor, num_draws: int) -> Tensor:
    """Uniform random numbers in [0, 1), float64 (B, num_draws), one for each sample (int64) and draw.

    They depend only on ``key``, the sample and the number of the draw.
    Draw d of sample s is number s·num_draws + d of the SplitMix64 generator (Steele, Lea and Flood 2014; the constants
    of its mixing function are David Stafford's variant 13) that starts at ``key``. int64 arithmetic wraps like that of
    uint64.
    """
    position = samples[:, None] * num_draws + torch.arange(num_draws, device=samples.device)
    state = (position + 1) * _signed(0x9E3779B97F4A7C15) + _signed(key)
    state = (state ^ _shifted_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted_right(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shifted_right(state, 31)
    return _shifted_right(state, 11).double() * 2.0**-53


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted_right(words: Tensor, bits: int) -> Tensor:
    """A logical shift: the one of torch copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _random_crop(pixels: Tensor, draws: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop a random box from each image and resize it to ``size``.

    A box has 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3 (Szegedy et al. 2015).
    Like torchvision's RandomResizedCrop, except that a side longer than the image is cut to the image instead of drawn
    again, and that a box may start between two pixels.
    """
    height, width = pixels.shape[2:]
    area = height * width * (0.08 + 0.92 * draws[:, _AREA])
    aspect = torch.exp((2 * draws[:, _ASPECT] - 1) * _LOG_ASPECT)
    box_height = (area / aspect).sqrt().clamp(max=height) / height  # (B,), as a fraction of the image
    box_width = (area * aspect).sqrt().clamp(max=width) / width
    centre_y = (2 * draws[:, _TOP] - 1) * (1 - box_height)  # -1 and 1 are the edges of the image
    centre_x = (2 * draws[:, _LEFT] - 1) * (1 - box_width)
    zero = torch.zeros_like(area)
    boxes = torch.stack([box_width, zero, centre_x, zero, box_height, centre_y], dim=1).view(-1, 2, 3).to(pixels.dtype)
    grid = F.affine_grid(boxes, [*pixels.shape[:2], *size], align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
