"""Resizes, augments and normalises a batch on its device, which makes it the network's input."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.network import Size, training_size
from raytrain.data.blocks import Buffers
from raytrain.data.dataset import training_format
from raytrain.data.images.crop_box import crop_boxes, crop_numbers
from raytrain.data.plan.permutation import Floats, Int64s, mix, uniform
from raytrain.training.batches.augmentation import Augmentation

_FLIP, _DOWN, _RIGHT, _NUMBERS_PER_IMAGE = range(4)  # columns of an image's random numbers, and their count


class Augment:
    """Turns images, uint8 (B, H, W, C) with B at least 1, into the network's input (B, C, *size).

    Images are resized, augmented for training, and normalised. The size depends on the epoch if ``--image-size`` has
    two sizes. The result is float32, or float64 with that precision, in the configured memory format, on the device of
    the images. Without ``crops``, training images were cropped before, as with the user's own transforms.

    The random numbers of an image depend only on the seed, the epoch and the draw. So an image looks the same in any
    batch, on any worker or device, and after a resume.
    """

    def __init__(self, config: ResolvedConfig, *, crops: bool = True) -> None:
        self.config = config
        self.crops = crops
        self.augmentation = Augmentation(
            config.auto_augment,
            rotation=config.rotation,
            color_jitter=config.color_jitter,
            blur=config.blur,
            random_erasing=config.random_erasing,
            fill=[round(255 * mean) for mean in config.mean],  # 0 after normalisation
            seed=config.seed,
        )
        self.source_shape = (*training_format(config).shape.size, config.channels)
        self.dtype = _dtype(config)
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        by_channel = torch.tensor([config.mean, config.std], dtype=torch.float64)[:, :, None, None]  # (2, C, 1, 1)
        self.scale = (1 / (255 * by_channel[1])).to(self.dtype)  # x·scale + shift = (x/255 - mean) / std
        self.shift = (-by_channel[0] / by_channel[1]).to(self.dtype)
        self._buffers = Buffers()

    def train(self, images: Tensor, draws: Int64s, epoch: int) -> Tensor:
        """Return the ``images`` of ``draws``, int64 (B,), as the network's input in ``epoch``, augmented."""
        seed = self.config.seed
        pixels = images.permute(0, 3, 1, 2)  # (B, C, H, W)

        if self.crops:
            pixels = crop_and_resize(pixels, draws, epoch, self.config)
        else:  # cropped and resized already, but for a placeholder, which still has the size of the source images
            pixels = _resize(pixels, training_size(self.config.image_size, epoch, self.config.epochs), self.config)
        if self.augmentation:
            pixels = self.augmentation(pixels.round().to(torch.uint8), draws, epoch)

        # Flip and shift, by one gather on the device for the whole batch.
        if self.config.flip == "none" and not self.config.translate:
            return self._normalise(pixels)
        numbers = uniform(mix(seed, epoch), draws, _NUMBERS_PER_IMAGE)
        if self.config.flip == "alternating":
            # An image is flipped if its number is below 0.5: let that be so in every second epoch (Jordan 2024).
            numbers[:, _FLIP] = (uniform(mix(seed), draws, _NUMBERS_PER_IMAGE)[:, _FLIP] + epoch / 2) % 1
        on_device = torch.from_numpy(numbers).to(pixels.device, non_blocking=True)  # without waiting for the GPU
        return self._normalise(*self._flip_and_shift(pixels, on_device))

    def evaluate(self, images: Tensor) -> Tensor:
        """Return ``images`` as the network's input in an evaluation: resized and normalised, not augmented."""
        return self._normalise(_resize(images.permute(0, 3, 1, 2), self.config.full_image_size, self.config))

    def _flip_and_shift(self, pixels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Flip and shift ``pixels``, (B, C, H, W), by the random ``numbers``, (B, 3); their dtype stays the same.

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
        """Return ``pixels``, (B, C, H, W), normalised, in the network's dtype and memory format.

        Pixels that are not ``inside``, a mask, become 0. On a CPU, a later batch reuses the memory of the result once
        nothing refers to it.
        """
        self.scale, self.shift = self.scale.to(pixels.device), self.shift.to(pixels.device)
        # Copy the pixels. On a CPU, the copy reuses the memory of an earlier batch, unless a program is being exported.
        if pixels.device.type != "cpu" or torch.compiler.is_compiling():
            planes = pixels.to(self.dtype, memory_format=torch.contiguous_format, copy=True)
        else:
            memory = self._buffers.take((pixels.numel() * self.dtype.itemsize,))
            planes = torch.from_numpy(memory).view(self.dtype).view(pixels.shape).copy_(pixels)
        planes.mul_(self.scale).add_(self.shift)
        if inside is not None:
            planes.mul_(inside)
        return planes.contiguous(memory_format=self.memory_format)  # last: broadcasting over three channels is slow


def _within(index: Tensor, size: int) -> Tensor:
    """Return which elements of ``index`` are indices into ``size`` elements, as a mask."""
    return (index >= 0) & (index < size)


def crop_and_resize(pixels: Tensor, draws: Int64s, epoch: int, config: ResolvedConfig) -> Tensor:
    """Return the images of ``draws``, (B, C, H, W), in the size of ``epoch``; cached images are cropped first.

    A cache has whole images; all others were cropped when they were decoded. Images that need neither are returned
    unchanged; others as floats from 0 to 255.
    """
    if config.cache_side is not None:
        pixels = _crop(pixels.to(_dtype(config)), crop_numbers(config.seed, epoch, draws), config)
    return _resize(pixels, training_size(config.image_size, epoch, config.epochs), config)


def _dtype(config: ResolvedConfig) -> torch.dtype:
    return torch.float64 if config.precision == "float64" else torch.float32


def _resize(pixels: Tensor, size: Size, config: ResolvedConfig) -> Tensor:
    """Return ``pixels``, (B, C, H, W), in this height and width, as floats from 0 to 255; unchanged if they have it."""
    if pixels.shape[2:] == size:
        return pixels
    return F.interpolate(pixels.to(_dtype(config)), size, mode=config.interpolation, antialias=True).clamp(0, 255)


def _crop(pixels: Tensor, numbers: Floats, config: ResolvedConfig) -> Tensor:
    """Crop a box that ``numbers`` (B, 4) determine from each image (B, C, H, W), and resize it to the image size."""
    height, width = pixels.shape[2:]
    left, top, right, bottom = crop_boxes((height, width), numbers).T  # (B,) each
    # An affine matrix for each image maps positions in the result to those in the image. In both, -1 and 1 are edges.
    zero = np.zeros_like(left)
    across = [(right - left) / width, zero, (left + right) / width - 1]
    down = [zero, (bottom - top) / height, (top + bottom) / height - 1]
    boxes = torch.from_numpy(np.stack([across, down]).transpose(2, 0, 1)).to(pixels, non_blocking=True)  # (B, 2, 3)
    grid = F.affine_grid(boxes, [*pixels.shape[:2], *config.full_image_size], align_corners=False)
    crops = F.grid_sample(pixels, grid, mode=config.interpolation, padding_mode="border", align_corners=False)
    return crops.clamp(0, 255)  # bicubic interpolation overshoots
