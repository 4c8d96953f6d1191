"""torchvision's operations on a batch of images, with a magnitude of its own for each image, in a few kernels.

torchvision's functions take a batch, too, but one magnitude for all of its images. If each image has its own magnitude,
they are called once for each image, and the host takes longer to launch these small kernels than the device to compute
them. Here the images of a batch are sorted by their operation, and each operation takes a few kernels for all images
that get it. On a CPU, where calls cost little, it takes a few kernels for each group of images that fits into the
cache.

Two properties follow from how these kernels round:

- Each result equals that of torchvision's function on uint8, or differs by one level if a sum of products is so near to
  a whole number that rounding decides on which side of it the sum falls.
- An image gets the same bytes in any batch. Products and sums are separate kernels, because IEEE arithmetic defines how
  each is rounded, while a fused multiply-add is used for some elements of a tensor and not for others. Sums over pixels
  are sums of whole numbers, which are exact in any order. Sampling between pixels treats each image alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config.network import Size
from raytrain.data.plan.permutation import Floats, Int64s


class Operation(IntEnum):
    """An operation on an image, named as in torchvision's RandAugment; the comment says what its magnitude means.

    RandAugment draws from all operations up to EQUALIZE.
    """

    IDENTITY = 0
    SHEAR_X = 1  # tangent of the angle
    SHEAR_Y = 2
    TRANSLATE_X = 3  # pixels, of which the fraction is cut off
    TRANSLATE_Y = 4
    ROTATE = 5  # degrees, counter-clockwise
    BRIGHTNESS = 6  # this one and the next three: the factor is 1 + magnitude
    COLOR = 7
    CONTRAST = 8
    SHARPNESS = 9
    POSTERIZE = 10  # bits that are kept
    SOLARIZE = 11  # as a fraction of 255, the threshold from which on pixels are inverted
    AUTO_CONTRAST = 12
    EQUALIZE = 13
    BLUR = 14  # standard deviation of the Gaussian, in pixels


Step = tuple[npt.NDArray[np.integer], Floats]
"""An :class:`Operation` for each image, (m,), and its magnitude, (m,)."""

_NUM_NUMBERS = 6  # for each image on the device: those of an affine matrix; other operations need fewer
_CACHE_BYTES = 1 << 20  # of float32 pixels: a core's cache holds a few copies of this many
_BLUR_REACH = 12  # pixels: farther away, a Gaussian of 2 pixels is below the rounding of float32


def apply_operations(images: Tensor, steps: Iterable[Step], fill: Tensor) -> Tensor:
    """Return the images, uint8 (m, C, H, W), with one operation after the other applied to each.

    Args:
        images: uint8 (m, C, H, W) with one or three channels; they are not changed.
        steps: the operations of one step after the other, (m,), each an :class:`Operation`, and their magnitudes,
            float64 (m,), in the unit of each operation; on the host.
        fill: float32 (C, 1, 1), on the device of the images: the colour of points outside of an image.

    Example:
        >>> step = np.full(8, Operation.ROTATE), np.linspace(-30, 30, 8)
        >>> turned = apply_operations(images, [step], fill)
    """
    # Sort the images of each step by their function, so that each gets all of its images at once. They stay in this
    # order for the next step; `order` says which image is where.
    function_of = _CUDA_FUNCTION_OF if images.is_cuda else _FUNCTION_OF
    order, sortings, kinds, strengths = np.arange(len(images)), [], [], []
    for operations, magnitudes in steps:
        if operations.any():  # not all are the identity
            sortings.append(np.argsort(function_of[operations[order]], kind="stable"))
            order = order[sortings[-1]]
            kinds.append(operations[order])
            strengths.append(magnitudes[order])
    if not sortings:
        return images.clone()

    # One copy brings all numbers to the device, in a shape that is broadcast over the pixels of an image.
    numbers = _numbers(np.concatenate(kinds), np.concatenate(strengths), (images.shape[2], images.shape[3]))
    numbers = torch.from_numpy(numbers).to(images.device, non_blocking=True).split(len(images), 1)  # (6, m, 1, 1, 1)

    # Replace the images of each function by its results. On a CPU, it gets only as many at a time as stay in the cache
    # from one kernel to the next, or one for each thread.
    in_cache = _CACHE_BYTES // (4 * math.prod(images.shape[1:]))
    most_rows = len(images) if images.is_cuda else max(torch.get_num_threads(), in_cache)
    for rows, operations, step_numbers in zip(sortings, kinds, numbers, strict=True):
        images, functions = _in_order(images, rows), function_of[operations]
        edges = [0, *(np.flatnonzero(np.diff(functions)) + 1).tolist(), len(images)]
        starts = [start for first, end in pairwise(edges) for start in range(first, end, most_rows)]
        sizes = np.diff([*starts, len(images)]).tolist()
        for start, group, group_numbers in zip(starts, images.split(sizes), step_numbers.split(sizes, 1), strict=True):
            if apply := _FUNCTIONS[functions[start]]:
                changed = apply(group, group_numbers, fill)
                # On a CPU, torch converts float32 to int16 and that to uint8 three times faster than float32 to uint8.
                if changed.is_floating_point() and not images.is_cuda:
                    changed = changed.to(torch.int16)
                if changed is not group:
                    group.copy_(changed)
    return _in_order(images, np.argsort(order))


def _in_order(images: Tensor, rows: npt.NDArray[np.integer]) -> Tensor:
    """Return a copy of the images in the order of ``rows``."""
    return images.index_select(0, torch.from_numpy(rows).to(images.device, non_blocking=True))


def erase(images: Tensor, boxes: Int64s, fill: Tensor) -> Tensor:
    """Return the images, uint8 (m, C, H, W), with a box of each replaced by a colour.

    Args:
        images: uint8 (m, C, H, W); they are not changed.
        boxes: int64 (m, 4), on the host: top, left, bottom and right, in pixels; a box may be empty.
        fill: float32 (C, 1, 1), the colour, on the device of the images.
    """
    fill = fill.to(torch.uint8)
    if images.is_cuda:
        return _erase_by_masks(images, boxes, fill)
    images = images.clone()
    for image, (top, left, bottom, right) in zip(images, boxes.tolist(), strict=True):
        if top < bottom and left < right:
            image[:, top:bottom, left:right] = fill
    return images


def _erase_by_masks(images: Tensor, boxes: Int64s, fill: Tensor) -> Tensor:
    """Return the images with a box of each replaced by the colour ``fill``, uint8, in a few kernels for all of them."""
    top, left, bottom, right = torch.from_numpy(boxes).to(images.device, non_blocking=True).T[:, :, None]  # (m, 1) each
    y = torch.arange(images.shape[2], device=images.device)
    x = torch.arange(images.shape[3], device=images.device)
    is_row, is_column = ((y >= top) & (y < bottom)).to(torch.uint8), ((x >= left) & (x < right)).to(torch.uint8)
    inside = is_row[:, None, :, None] * is_column[:, None, None, :]  # 1 in the box, 0 elsewhere
    return images.mul(1 - inside).add_(fill * inside)


def _numbers(kinds: npt.NDArray[np.integer], magnitudes: Floats, size: Size) -> npt.NDArray[np.float32]:
    """Return the numbers that the function of each image's operation takes, float32 (6, m, 1, 1, 1).

    They are an affine matrix, two weights, or a single number, followed by zeros. ``kinds`` are the operations.
    """
    numbers = np.zeros((_NUM_NUMBERS, len(kinds)))
    height, width = size

    # An affine matrix maps the position of a pixel in the result to its position in the image, in pixels from the
    # middle: x is a·x + b·y + c in the image, and y is d·x + e·y + f. The six rows are views: setting them sets
    # `numbers`.
    a, b, c, d, e, f = numbers
    x_sheared, y_sheared = kinds == Operation.SHEAR_X, kinds == Operation.SHEAR_Y
    a[kinds <= Operation.ROTATE] = e[kinds <= Operation.ROTATE] = 1
    b[x_sheared], c[x_sheared] = magnitudes[x_sheared], magnitudes[x_sheared] * height / 2  # the top left corner stays
    d[y_sheared], f[y_sheared] = magnitudes[y_sheared], magnitudes[y_sheared] * width / 2
    c[kinds == Operation.TRANSLATE_X] = -np.trunc(magnitudes[kinds == Operation.TRANSLATE_X])
    f[kinds == Operation.TRANSLATE_Y] = -np.trunc(magnitudes[kinds == Operation.TRANSLATE_Y])
    turned = kinds == Operation.ROTATE
    angles = np.radians(magnitudes[turned])
    a[turned], b[turned], d[turned], e[turned] = np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)

    # Blending takes the weights of the image and of the one it is blended with; the other operations take one number.
    blended = (kinds >= Operation.BRIGHTNESS) & (kinds <= Operation.SHARPNESS)
    a[blended], b[blended] = 1 + magnitudes[blended], -magnitudes[blended]
    reduced = kinds == Operation.POSTERIZE
    a[reduced] = 256 - 2 ** (8 - np.trunc(magnitudes[reduced]))  # a mask of the bits that are kept
    a[kinds == Operation.SOLARIZE] = np.ceil((255 * magnitudes[kinds == Operation.SOLARIZE]).astype(np.float32))
    a[kinds == Operation.BLUR] = magnitudes[kinds == Operation.BLUR]
    return numbers.astype(np.float32)[..., None, None, None]


_WEIGHT_OF_NEIGHBOURHOOD = torch.tensor(13.0, dtype=torch.float32)  # a number would have the default type


# The functions of the operations follow, all with the same arguments: images, uint8 (n, C, H, W), their numbers,
# (6, n, 1, 1, 1), and the fill colour. They return float32 or uint8 (n, C, H, W), or change the images in place and
# return them. They name each type, as a loop may set another default type. _part, _blend and _grey help them.


def _affine(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Sample each image bilinearly at the points that its matrix gives; points outside of it get ``fill``."""
    # The points in pixels from the middle: those across and those down are a plane each.
    height, width = images.shape[2:]
    x = torch.linspace((1 - width) / 2, (width - 1) / 2, width, dtype=torch.float32, device=images.device)
    y = torch.linspace((1 - height) / 2, (height - 1) / 2, height, dtype=torch.float32, device=images.device)[:, None]
    by_x, by_y, shift = matrices[..., 0].unflatten(0, (2, 3)).unbind(1)  # (2, n, 1, 1) each
    in_row, in_column = by_x * x, by_y * y + shift  # (2, n, 1, W) and (2, n, H, 1)
    points = in_row + in_column  # (2, n, H, W)

    # The grid has both side by side, as a complex number has, and in halves of the image.
    row, column = (torch.complex(right * (2 / width), down * (2 / height)) for right, down in (in_row, in_column))
    grid = torch.view_as_real(row + column)  # (n, H, W, 2)
    colour = F.grid_sample(images.float(), grid, align_corners=False)

    # Of the square of a pixel around a point near an edge, a fraction lies inside of the image: the product of two
    # fractions, which are both negative here.
    across, down = points.abs_().unbind(0)
    across.sub_((width + 1) / 2)
    down.sub_((height + 1) / 2)
    points.clamp_(-1, 0)
    inside = across.mul_(down)[:, None]  # (n, 1, H, W)
    return colour.sub_(fill).mul_(inside).add_(fill).round_()


def _translate(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Move each image by the whole pixels that its matrix gives; points outside of it get ``fill``.

    On a CPU, copying the part of each image that remains is ten times faster than ``_affine``, and twice as fast again
    in NumPy, whose calls cost less. A GPU takes ``_affine``, whose kernels move all images at once.
    """
    height, width = images.shape[2:]
    result = np.empty(images.shape, np.uint8)
    result[:] = fill.to(torch.uint8).numpy()
    shifts = matrices[2::3, :, 0, 0, 0].T.int().tolist()
    for image, moved, (right, down) in zip(images.numpy(), result, shifts, strict=True):
        moved[:, _part(-down, height), _part(-right, width)] = image[:, _part(down, height), _part(right, width)]
    return torch.from_numpy(result)


def _part(offset: int, side: int) -> slice:
    """Return the pixels of a side from ``offset`` on, or if that is negative, those up to as many before its end."""
    return slice(max(0, offset), max(0, side + min(0, offset)))


def _blend(pixels: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """Change ``pixels``, float32, to pixels · w0 + ``others`` · w1 with each image's two ``weights``; return them."""
    return pixels.mul_(weights[0]).add_(others * weights[1]).clamp_(0, 255)


def _grey(pixels: Tensor) -> Tensor:
    """Return the brightness of each pixel of float32 (n, C, H, W), a whole number, float32 (n, 1, H, W).

    Products and sums here are exact.
    """
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = pixels.split(1, 1)
    return (red * 2989.0).add_(green, alpha=5870.0).add_(blue, alpha=1140.0).div_(10_000.0).floor_()


def _brightness(images: Tensor, weights: Tensor, fill: Tensor) -> Tensor:
    """Blend each image with black."""
    return images.float().mul_(weights[0]).clamp_(0, 255)


def _color(images: Tensor, weights: Tensor, fill: Tensor) -> Tensor:
    """Blend each image with its brightness, in grey; grey images stay as they are."""
    pixels = images.float()
    return images if images.shape[1] == 1 else _blend(pixels, _grey(pixels), weights)


def _contrast(images: Tensor, weights: Tensor, fill: Tensor) -> Tensor:
    """Blend each image with its mean brightness."""
    pixels = images.float()
    mean = _grey(pixels).mean((1, 2, 3), keepdim=True, dtype=torch.float64).float()  # the sum is exact
    return _blend(pixels, mean, weights)


def _sharpness(images: Tensor, weights: Tensor, fill: Tensor) -> Tensor:
    """Blend each inner pixel with the mean of its 3 × 3 neighbourhood, in which the pixel itself counts five times."""
    height, width = images.shape[2:]
    if min(height, width) <= 2:  # there is no inner pixel
        return images
    # Add up three rows, and then three columns of these sums.
    levels = images.to(torch.int16)
    rows = levels.narrow(2, 0, height - 2) + levels.narrow(2, 1, height - 2)
    rows.add_(levels.narrow(2, 2, height - 2))
    sums = rows.narrow(3, 0, width - 2) + rows.narrow(3, 1, width - 2)
    sums.add_(rows.narrow(3, 2, width - 2)).add_(levels[..., 1:-1, 1:-1], alpha=4)

    # The inner pixels are a view of the result.
    result = images.float()
    inner = result[..., 1:-1, 1:-1]
    inner.add_(sums.div(_WEIGHT_OF_NEIGHBOURHOOD).round_().sub_(inner).mul_(weights[1]))
    return result.clamp_(0, 255)


def _posterize(images: Tensor, masks: Tensor, fill: Tensor) -> Tensor:
    """Keep only the bits of each level that the image's mask has."""
    return images.bitwise_and_(masks[0].to(torch.uint8))


def _solarize(images: Tensor, thresholds: Tensor, fill: Tensor) -> Tensor:
    """Invert all levels from the image's threshold on."""
    # The comparison is a minimum and a difference, which are many times faster than ``where`` on a CPU: at least 1
    # below the threshold, and 0 from there on. Less 1 that is 0 below it, and 255, all bits, from there on.
    levels = thresholds[0].to(torch.uint8)
    return images.bitwise_xor_((levels - torch.minimum(images, levels)).clamp_(max=1).sub_(1))


def _auto_contrast(images: Tensor, numbers: Tensor, fill: Tensor) -> Tensor:
    """Stretch each channel so that its darkest pixel becomes 0 and its brightest 255, unless they are equal."""
    pixels = images.float()
    darkest, brightest = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)  # (n, C, 1, 1) each
    is_flat = darkest == brightest
    scale = (brightest - darkest).mul_(1 / 255).masked_fill_(is_flat, 1)
    return pixels.sub_(darkest.masked_fill_(is_flat, 0)).div_(scale)


def _equalize(images: Tensor, numbers: Tensor, fill: Tensor) -> Tensor:
    """Replace each level by the share of the channel's pixels that are below it, as Pillow does.

    A channel of an image is a plane here. One with a single level stays as it is.
    """
    # Count the pixels of each level in each plane.
    num_planes, num_pixels = images.shape[0] * images.shape[1], images.shape[2] * images.shape[3]
    planes = images.view(num_planes, num_pixels)
    levels = planes.to(torch.int64)
    if images.is_cuda:  # there, bincount would make the host wait
        counts = torch.zeros(num_planes, 256, dtype=torch.int64, device=images.device)
        counts.scatter_add_(1, levels, counts.new_ones(1, 1).expand_as(levels))
    else:  # there, scatter_add_ is slow; plane i has the numbers from 256·i on
        first = torch.arange(0, 256 * num_planes, 256, dtype=torch.int32)[:, None]
        counts = torch.bincount((planes + first).view(-1), minlength=256 * num_planes).view(num_planes, 256)
    up_to = counts.cumsum(1)

    # A step is the number of pixels for one new level: all but those of the brightest level, divided by 255. The
    # brightest level that occurs is the only level that has pixels and up to which all pixels are counted.
    num_brightest = (counts * (up_to == num_pixels)).sum(1, keepdim=True)
    step = (num_pixels - num_brightest).div_(255, rounding_mode="floor")
    below = (up_to - counts).add_(step.div(2, rounding_mode="floor"))
    table = below.div_(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    unchanged = torch.arange(256, device=images.device)
    return torch.where(step == 0, unchanged, table).to(torch.uint8).gather(1, levels).view(images.shape)


def _blur(images: Tensor, sigmas: Tensor, fill: Tensor) -> Tensor:
    """Blur each image, along its columns and then its rows, by a Gaussian cut off at a tenth of the shorter side."""
    reach = min(min(images.shape[2:]) // 10, _BLUR_REACH)  # pixels to each side
    if not reach:
        return images
    # The weights of the Gaussian, by the distance from the pixel. Exponentials are computed in float64, because their
    # last bit depends on the position in a tensor, and is then rounded off.
    distances = torch.arange(reach + 1, dtype=torch.float64, device=images.device)
    weights = distances.div(sigmas[0, :, 0, 0]).square_().mul_(-0.5).exp_()  # (n, reach + 1)
    weights.div_(2 * weights.sum(1, keepdim=True) - 1)  # all weights but the middle one count twice
    middle, *others = weights.float()[..., None, None, None].unbind(1)  # (n, 1, 1, 1) each

    # Along each axis, add up the pixel and the pairs of pixels that have the same distance from it.
    pixels = images.float()
    for axis, padding in ((2, (0, 0, reach, reach)), (3, (reach, reach, 0, 0))):
        padded, side = F.pad(pixels, padding, mode="reflect"), pixels.shape[axis]
        pixels = pixels * middle
        for distance, weight in enumerate(others, start=1):
            pair = padded.narrow(axis, reach - distance, side) + padded.narrow(axis, reach + distance, side)
            pixels.add_(pair.mul_(weight))
    return pixels.round_()


_Function = Callable[[Tensor, Tensor, Tensor], Tensor]
_FUNCTIONS: list[_Function | None] = [
    *(None, _affine, _translate, _brightness, _color, _contrast, _sharpness),
    *(_posterize, _solarize, _auto_contrast, _equalize, _blur),
]
_FUNCTION_OF = np.array([0, 1, 1, 2, 2, 1, *range(3, 12)])
"""Index in ``_FUNCTIONS`` of each operation's function: none for the identity, one for shears and rotations."""
_CUDA_FUNCTION_OF = np.where(_FUNCTION_OF == 2, 1, _FUNCTION_OF)
"""The same on a GPU, on which translations, too, are affine."""
