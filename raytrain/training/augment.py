"""From decoded images to what the network sees, a whole batch at a time on the device, with random numbers of each sample's own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import TrainConfig
from raytrain.data.permutation import mix

_FLIP, _DOWN, _RIGHT, _AREA, _ASPECT, _TOP, _LEFT, _NUM_DRAWS = range(8)
_LOG_ASPECT = math.log(4 / 3)


class Augment:
    """Turns images, uint8 (B, H, W, C) with B at least 1, into the network's, (B, C, *image_size).

    They are resized, normalised and, for training, varied; they come out in float32 (float64 with that precision) and in the
    configured memory order, on the device that they were on.

    The random numbers of an image depend on the seed, the epoch and the sample alone: it looks the same whatever batch, worker
    or device it is on, and after a resume.
    """

    def __init__(self, config: TrainConfig, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """``mean`` and ``std``: of each channel, with pixels in 0..1."""
        self.config = config
        self.source_shape = (*config.image_size, config.channels)
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        by_channel = torch.tensor([mean, std], dtype=torch.float64)[:, :, None, None]  # (2, C, 1, 1)
        self.scale = (1 / (255 * by_channel[1])).to(self.dtype)  # x·scale + shift = (x/255 - mean) / std
        self.shift = (-by_channel[0] / by_channel[1]).to(self.dtype)

    def train(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """The training images of the ``samples``, int64 (B,), as they look in ``epoch``."""
        draws = uniform(mix(self.config.seed, epoch), samples, _NUM_DRAWS)  # (B, draws)
        pixels = images.permute(0, 3, 1, 2)  # (B, C, H, W)
        if self.config.random_resized_crop:
            pixels = _random_crop(pixels.to(self.dtype), draws, self.config.image_size)
        else:
            pixels = self._resized(pixels)
        if not (self.config.horizontal_flip or self.config.translate):
            return self._normalised(pixels)
        return self._normalised(*self._moved(pixels, draws))

    def evaluate(self, images: Tensor) -> Tensor:
        """The images as they are, resized and normalised."""
        return self._normalised(self._resized(images.permute(0, 3, 1, 2)))

    def _resized(self, pixels: Tensor) -> Tensor:
        if pixels.shape[2:] == self.config.image_size:
            return pixels
        return F.interpolate(pixels.to(self.dtype), self.config.image_size, mode="bilinear", antialias=True)

    def _moved(self, pixels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Flips and shifts, still in uint8: the pixels, and bool (B, 1, H, W): which of them come from within the image."""
        height, width = pixels.shape[2:]
        reach = self.config.translate
        shifts = (draws[:, (_DOWN, _RIGHT)] * (2 * reach + 1)).long() - reach  # (B, 2), each of -reach..reach alike
        y = torch.arange(height, device=pixels.device) - shifts[:, :1]  # (B, H): the row that comes here
        x = torch.arange(width, device=pixels.device) - shifts[:, 1:]  # (B, W)
        inside = _within(y, height)[:, None, :, None] & _within(x, width)[:, None, None, :]
        if self.config.horizontal_flip:
            x = torch.where(draws[:, _FLIP, None] < 0.5, width - 1 - x, x)
        source = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]  # (B, H, W)
        source = source.flatten(1)[:, None].expand(-1, pixels.shape[1], -1)  # one gather in each plane beats any other indexing
        return pixels.flatten(2).gather(2, source).view(pixels.shape), inside

    def _normalised(self, pixels: Tensor, inside: Tensor | None = None) -> Tensor:
        """In the network's type and memory order, with 0 where not ``inside``."""
        self.scale, self.shift = self.scale.to(pixels.device), self.shift.to(pixels.device)
        planes = pixels.to(self.dtype, memory_format=torch.contiguous_format, copy=True).mul_(self.scale).add_(self.shift)
        if inside is not None:
            planes.mul_(inside)
        return planes.contiguous(memory_format=self.memory_format)  # last, for broadcasting over three channels is slow


def uniform(key: int, samples: Tensor, num_draws: int) -> Tensor:
    """Uniform random numbers in [0, 1), float64 (B, num_draws), a function of ``key``, the sample (int64) and the draw alone.

    Draw d of sample s is number s·num_draws + d of the SplitMix64 generator (Steele, Lea and Flood 2014; the constants of its
    mixing function are variant 13 of David Stafford) that starts at ``key``. int64 arithmetic wraps like uint64's.
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
    """A logical shift: torch's own copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _random_crop(pixels: Tensor, draws: Tensor, size: tuple[int, int]) -> Tensor:
    """A random box of each image, resized to ``size``: 8 % to 100 % of the area, 3:4 to 4:3 (Szegedy et al. 2015).

    As torchvision's RandomResizedCrop, but a side longer than the image is cut to it instead of drawn again, and a box may
    begin between two pixels.
    """
    height, width = pixels.shape[2:]
    area = height * width * (0.08 + 0.92 * draws[:, _AREA])
    aspect = torch.exp((2 * draws[:, _ASPECT] - 1) * _LOG_ASPECT)
    box_height = (area / aspect).sqrt().clamp(max=height) / height  # (B,), as a part of the image
    box_width = (area * aspect).sqrt().clamp(max=width) / width
    centre_y = (2 * draws[:, _TOP] - 1) * (1 - box_height)  # -1 and 1 are the edges of the image
    centre_x = (2 * draws[:, _LEFT] - 1) * (1 - box_width)
    zero = torch.zeros_like(area)
    boxes = torch.stack([box_width, zero, centre_x, zero, box_height, centre_y], dim=1).view(-1, 2, 3).to(pixels.dtype)
    grid = F.affine_grid(boxes, [*pixels.shape[:2], *size], align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
