"""Random changes of a batch of images, with random numbers of each image's own: `raytrain.Augmentation`.

An augmentation is a sequence of steps. In each step, every image gets one operation, perhaps the identity, with a
magnitude of its own. Operations and magnitudes are drawn on the host, in a few lines of NumPy for the whole batch, by a
generator whose position depends only on the seed, the epoch and the sample. So an image looks the same in any batch, in
any process, on any device and after a resume. The operations themselves are in
:mod:`raytrain.training.batches.image_operations`.

The distributions are those of torchvision's transforms of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain.config.data import AugmentationOptions, AutoAugment
from raytrain.config.network import Size
from raytrain.config.option_values import check_limit, hints_of, read_value
from raytrain.data.plan.permutation import Floats, Int64s, mix, uniform
from raytrain.errors import UsageError, format_count
from raytrain.training.batches.image_operations import Operation, Step, apply_operations, erase

Operations = npt.NDArray[np.int64]

_KEY = 3  # keeps these random numbers apart from those of crops, of flips, and of the user's transforms
_AUTO, _DEPTHS, _SHARES, _ROTATION, _JITTER, _BLUR, _ERASING = range(7)  # a stream of random numbers for each
_SIGMAS = (0.1, 2.0)  # pixels, of a blur
_AREAS, _ASPECTS, _TRIES = (0.02, 0.33), (0.3, 3.3), 10  # of an erased box
_NUM_CHAINS, _MAX_DEPTH = 3, 3  # of AugMix
# Operations that have two directions, such as left and right, or brighter and darker.
_HAS_SIGN = np.array([Operation.SHEAR_X <= operation <= Operation.SHARPNESS for operation in Operation])


@lru_cache(maxsize=16)
def magnitudes_of(policy: str, size: Size) -> Floats:
    """Return the magnitudes of each operation of a policy for images of this height and width, float64 (14, levels).

    A row is an :class:`Operation` up to EQUALIZE, a column one of the policy's levels, 10 of AugMix and 31 of the
    others. They are equal to torchvision's to the last bit, because a pixel may be just at the threshold of solarize.

    Example: ``magnitudes_of("rand", (224, 224))[Operation.ROTATE, 9] == 9`` degrees
    """
    # The largest magnitudes of each policy, as torchvision has them.
    (height, width), num_levels = size, 10 if policy == "augmix" else 31
    shear, across, down, degrees, factor, most_bits, least_bits = {
        "rand": (0.3, 150 / 331 * width, 150 / 331 * height, 30, 0.9, 8, 4),
        "trivial": (0.99, 32, 32, 135, 0.99, 8, 2),
        "augmix": (0.3, width / 3, height / 3, 30, 0.9, 4, 0),
    }[policy]

    # In the order of Operation: from the identity to SHARPNESS, POSTERIZE, SOLARIZE, and two that have no magnitude.
    from_zero = [_linspace(0, end, num_levels) for end in (0, shear, shear, across, down, degrees, *[factor] * 4)]
    bits = np.round(most_bits - np.arange(num_levels) / ((num_levels - 1) / (most_bits - least_bits)))
    thresholds, none = _linspace(1, 0, num_levels), np.zeros(num_levels)
    return np.stack([*from_zero, bits, thresholds, none, none])


def _linspace(start: float, end: float, count: int) -> Floats:
    """Return the numbers of ``torch.linspace``: float32, each computed from the nearer end, and rounded once."""
    first, last = np.float32(start), np.float32(end)
    step, index = np.float64((last - first) / np.float32(count - 1)), np.arange(count)
    values = np.where(index < count // 2, first + step * index, last - step * index[::-1])
    return values.astype(np.float32).astype(np.float64)


class Augmentation:
    """Random changes of a batch of images, in a few kernels for all of them, with random numbers of each image's own.

    Call it with images, uint8 (m, C, H, W), the numbers of their samples, and the epoch. It returns changed images of
    the same type and shape, on the same device. How an image is changed depends on ``seed``, the epoch and its sample
    alone: it looks the same in any batch, in any process, and after a resume::

        augmentation = raytrain.Augmentation("rand-m9-n2", random_erasing=0.25, fill=(124, 116, 104))
        for epoch in range(10):
            for images, labels, samples in loader:
                images = augmentation(images.to("cuda"), samples, epoch)

    Args:
        auto_augment: ``randaugment``, or ``rand-m9-n2`` with a magnitude (0 to 30) and a number of operations,
            ``trivialaugment``, ``augmix``, ``augmix-m3`` with a severity (1 to 10), or ``3-augment``; as torchvision's.
        rotation: rotate by up to this many degrees in either direction.
        color_jitter: change brightness, contrast and saturation by up to this fraction, in a random order.
        blur: fraction of the images that are blurred, by a Gaussian of 0.1 to 2 pixels.
        random_erasing: fraction of the images of which a random box gets the colour ``fill``.
        fill: colour of pixels that an operation uncovers, from 0 to 255: a number, or one for each channel.
        seed: any whole number.

    Raises UsageError for a policy that does not exist, and for numbers that the options of a run do not take, either.
    """

    def __init__(
        self,
        auto_augment: str | None = None,
        *,
        rotation: float = 0.0,
        color_jitter: float = 0.0,
        blur: float = 0.0,
        random_erasing: float = 0.0,
        fill: float | Sequence[float] = 128,
        seed: int = 0,
    ) -> None:
        policy = _option("auto_augment", auto_augment)
        self.auto_augment = None if policy is None else AutoAugment.parse(policy)
        self.rotation, self.color_jitter = _option("rotation", rotation), _option("color_jitter", color_jitter)
        self.blur, self.random_erasing = _option("blur", blur), _option("random_erasing", random_erasing)
        self.seed = _whole("seed", seed)
        colours = np.asarray(fill)
        if colours.dtype.kind not in "iuf" or colours.ndim > 1 or not ((colours >= 0) & (colours <= 255)).all():
            raise UsageError(
                f"Augmentation got the fill {fill!r:.80}; give a number from 0 to 255, or one for each channel."
            )
        self._fill = torch.from_numpy(colours.astype(np.float32)).reshape(-1, 1, 1)  # (C, 1, 1)

    def __bool__(self) -> bool:
        """Return whether this augmentation changes anything."""
        return any((self.auto_augment, self.rotation, self.color_jitter, self.blur, self.random_erasing))

    def __call__(self, images: Tensor, samples: Tensor | Sequence[int] | Int64s, epoch: int = 0) -> Tensor:
        """Return ``images``, uint8 (m, C, H, W) with one or three channels, changed for ``epoch``.

        ``samples``, whole numbers (m,), say which images these are; if they are on a GPU, the host waits for them.
        Raises UsageError for images of another type or shape, and for samples or an epoch that are no whole numbers.
        """
        numbers, epoch = np.asarray(samples.cpu() if isinstance(samples, Tensor) else samples), _whole("epoch", epoch)
        self._check(images, numbers)
        if not len(images):
            return images
        numbers = numbers.astype(np.int64)
        self._fill = fill = self._fill.to(images.device)
        images = images.contiguous()
        size = images.shape[2], images.shape[3]

        # AugMix comes first, then the operations of one after the other step, and erased boxes last.
        if self.auto_augment is not None and self.auto_augment.policy == "augmix":
            images = self._augmix(images, numbers, epoch, self.auto_augment.magnitude)
        images = apply_operations(images, self.steps(numbers, epoch, size), fill)
        if self.random_erasing:
            images = erase(images, self._boxes(numbers, epoch, size), fill)
        return images

    def _check(self, images: object, samples: npt.NDArray[Any]) -> None:
        """Raise UsageError if ``images`` or the numbers of their ``samples`` have a wrong type or shape."""
        if not isinstance(images, Tensor):
            raise UsageError(
                f"Augmentation got images in a {type(images).__name__}; give a tensor, torch.uint8 (m, C, H, W)."
            )
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise UsageError(
                f"Augmentation got images of {images.dtype} {tuple(images.shape)}; give torch.uint8 (m, C, H, W) with "
                "one or three channels."
            )
        if len(self._fill) not in (1, images.shape[1]):
            raise UsageError(
                f"Augmentation has a fill of {format_count(len(self._fill), 'number')}, and images of "
                f"{format_count(images.shape[1], 'channel')}; give one number for each channel, or one for all."
            )
        if len(images) and samples.ndim > 1:
            raise UsageError(
                f"Augmentation got samples of the shape {samples.shape}; give whole numbers ({len(images)},), one for "
                "each image."
            )
        if samples.shape != images.shape[:1]:
            raise UsageError(
                f"Augmentation got {format_count(len(images), 'image')} and {format_count(samples.size, 'sample')}; "
                "give one for each."
            )
        if len(images) and samples.dtype.kind not in "iu":
            raise UsageError(
                f"Augmentation got samples of the type {samples.dtype}; give whole numbers, one for each image."
            )

    def _numbers(self, stream: int, samples: Int64s, epoch: int, count: int) -> Floats:
        """Return ``count`` random numbers in [0, 1) for each sample, float64 (count, m). Each use has a ``stream``."""
        return uniform(mix(self.seed, epoch, _KEY, stream), samples, count).T

    def steps(self, samples: Int64s, epoch: int, size: Size) -> Iterator[Step]:
        """Yield the operations on each of ``samples``, (m,), in ``epoch``, for images of this height and width.

        AugMix, which mixes results of operations, and erased boxes are left out.
        """
        if self.auto_augment is not None:
            yield from self._automatic_steps(self.auto_augment, samples, epoch, size)
        if self.rotation:
            (angles,) = self._numbers(_ROTATION, samples, epoch, 1)
            yield np.full(len(samples), Operation.ROTATE), _between(-self.rotation, self.rotation, angles)
        if self.color_jitter:
            numbers = self._numbers(_JITTER, samples, epoch, 6)
            magnitudes = _between(-min(1.0, self.color_jitter), self.color_jitter, numbers[:3])  # (3, m)
            kinds = np.array([Operation.BRIGHTNESS, Operation.CONTRAST, Operation.COLOR])
            for kind in numbers[3:].argsort(axis=0):  # (m,), of 0 to 2: each image has an order of its own
                yield kinds[kind], np.take_along_axis(magnitudes, kind[None], axis=0)[0]
        if self.blur:
            chance, sigmas = self._numbers(_BLUR, samples, epoch, 2)
            kinds = np.where(chance < self.blur, Operation.BLUR, Operation.IDENTITY)
            yield kinds, _between(*_SIGMAS, sigmas)

    def _automatic_steps(self, chosen: AutoAugment, samples: Int64s, epoch: int, size: Size) -> Iterator[Step]:
        """Yield the steps of RandAugment, TrivialAugment (Müller and Hutter 2021), or 3-Augment (DeiT III).

        AugMix has no steps, because it mixes images: see :meth:`_augmix`.
        """
        if chosen.policy == "augmix":
            return

        # 3-Augment: one of grey, solarize at half of the levels, and blur.
        if chosen.policy == "3-augment":
            kind, strength = self._numbers(_AUTO, samples, epoch, 2)
            kinds = np.array([Operation.COLOR, Operation.SOLARIZE, Operation.BLUR])[(kind * 3).astype(np.int64)]
            magnitudes = np.where(kinds == Operation.COLOR, -1.0, _between(*_SIGMAS, strength))  # -1: without colours
            yield kinds, np.where(kinds == Operation.SOLARIZE, 128 / 255, magnitudes)
            return

        # In each step, any operation up to EQUALIZE, the last one before BLUR. TrivialAugment draws the level of the
        # magnitude for each image, RandAugment has one for all.
        table = magnitudes_of(chosen.policy, size)  # (operations, levels)
        numbers = self._numbers(_AUTO, samples, epoch, 3 * chosen.num_operations)
        for kind, level, sign in numbers.reshape(chosen.num_operations, 3, -1):  # (m,) each, in [0, 1)
            operations = (kind * Operation.BLUR).astype(np.int64)
            levels = (level * table.shape[1]).astype(np.int64) if chosen.policy == "trivial" else chosen.magnitude
            yield operations, _signed(operations, table[operations, levels], sign)

    def _augmix(self, images: Tensor, samples: Int64s, epoch: int, severity: int) -> Tensor:
        """Return images mixed with three chains of one to three operations on each (Hendrycks et al. 2020)."""
        magnitudes = magnitudes_of("augmix", (images.shape[2], images.shape[3]))

        # Random shares that add up to 1: of the image itself, and of each chain. Exponential random numbers,
        # divided by their sum, are uniformly distributed over all ways to divide the rest among the chains.
        image_share, *chain_numbers = self._numbers(_SHARES, samples, epoch, 1 + _NUM_CHAINS)
        exponential = -np.log1p(-np.stack(chain_numbers))
        chain_shares = (1 - image_share) * exponential / exponential.sum(0)
        shares = torch.from_numpy(np.stack([image_share, *chain_shares]).astype(np.float32))
        shares = shares.to(images.device, non_blocking=True)[..., None, None, None]  # (4, m, 1, 1, 1)

        # Each chain has a depth of its own for each image: its further operations are the identity.
        depths = np.floor(_between(1, 1 + _MAX_DEPTH, self._numbers(_DEPTHS, samples, epoch, _NUM_CHAINS)))  # (3, m)
        numbers = self._numbers(_AUTO, samples, epoch, 3 * _NUM_CHAINS * _MAX_DEPTH)
        mixture = images * shares[0]
        for chain, chain_operations in enumerate(numbers.reshape(_NUM_CHAINS, _MAX_DEPTH, 3, -1)):
            steps: list[Step] = []
            for position, (kind, level, sign) in enumerate(chain_operations):
                operations = 1 + (kind * (Operation.BLUR - 1)).astype(np.int64)  # all but the identity
                operations = np.where(position < depths[chain], operations, Operation.IDENTITY)
                chosen = _signed(operations, magnitudes[operations, (level * severity).astype(np.int64)], sign)
                steps.append((operations, chosen))
            mixture.add_(apply_operations(images, steps, self._fill) * shares[1 + chain])
        return mixture.clamp_(0, 255).to(torch.uint8)

    def _boxes(self, samples: Int64s, epoch: int, size: Size) -> Int64s:
        """Return the box of each image that is erased, int64 (m, 4): top, left, bottom, right.

        It is empty for images of which none is erased, and for those into which none of ten tries fits.
        """
        # Draw ten areas and aspects for each image, which give ten heights and widths.
        height, width = size
        chance, top, left, *tries = self._numbers(_ERASING, samples, epoch, 3 + 2 * _TRIES)
        areas, aspects = np.stack(tries).reshape(2, _TRIES, -1)
        areas = height * width * _between(*_AREAS, areas)
        aspects = np.exp(_between(np.log(_ASPECTS[0]), np.log(_ASPECTS[1]), aspects))
        heights, widths = np.round(np.sqrt(areas * aspects)), np.round(np.sqrt(areas / aspects))  # (10, m)

        # Take the first of the ten boxes that fits into the image, and place it.
        fits = (heights < height) & (widths < width)
        first = fits.argmax(axis=0)[None]
        is_erased = fits.any(axis=0) & (chance < self.random_erasing)
        box_heights = np.take_along_axis(heights, first, axis=0)[0] * is_erased  # 0 makes the box empty
        box_widths = np.take_along_axis(widths, first, axis=0)[0] * is_erased
        top, left = np.floor(top * (height - box_heights + 1)), np.floor(left * (width - box_widths + 1))
        return np.stack([top, left, top + box_heights, left + box_widths], axis=1).astype(np.int64)


def _option(name: str, value: Any) -> Any:
    """Return the ``value`` of an option as a plain value; raise UsageError if a run would not take it."""
    plain = read_value(name, value, hints_of(AugmentationOptions)[name])
    if name != "auto_augment":
        check_limit(AugmentationOptions, name, plain)
    return plain


def _whole(name: str, value: Any) -> int:
    """Return ``value`` as an int; raise UsageError if it is no whole number, of Python, NumPy or torch."""
    if isinstance(value, SupportsIndex):
        with suppress(TypeError):  # an array of floats, or of several
            return index(value)
    raise UsageError(f"Augmentation got the {name} {value!r:.80}; give a whole number.")


def _signed(operations: Operations, magnitudes: Floats, numbers: Floats) -> Floats:
    """Return the magnitudes of operations, negative for half of the images if the operation has two directions.

    ``numbers`` in [0, 1), one for each image, decide.
    """
    return np.where(_HAS_SIGN[operations] & (numbers < 0.5), -magnitudes, magnitudes)


def _between(low: float, high: float, numbers: Floats) -> Floats:
    """Return ``numbers`` in [0, 1) stretched to the interval from ``low`` to ``high``."""
    return low + (high - low) * numbers
