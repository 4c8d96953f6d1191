"""Crop boxes, which say what is seen of an image (all, its centre, a random part); cuts them out and resizes them.

A :class:`Cropping` says how the boxes of a data set are chosen, a :class:`Crop` how the box of one image is, and a
:class:`CropBox` is the result for an image of known size. Crops come before sizes are known: they travel to the
process that fetches the file and reads its header. There :func:`cut` takes the box out of the decoded pixels, and one
of two libraries resizes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain.config.extras import pip_install
from raytrain.config.network import Interpolation, Resize, Resizer, Size
from raytrain.data.plan.permutation import Floats, Int64s, mix, uniform
from raytrain.errors import UsageError

Pixels = npt.NDArray[np.uint8]

ROUNDING = 1e-6  # pixels, more than an error of rounding

_AREA, _ASPECT, _TOP, _LEFT, _NUMBERS_PER_CROP = range(5)  # the random numbers of a crop, and how many they are
_MIN_AREA = 0.08  # fraction of the image
_LOG_ASPECT = math.log(4 / 3)  # of the largest ratio; the smallest one is its inverse
_CROP_STREAM = 1  # keeps the random numbers of the crops apart from the order of the samples and other augmentation


class CropBox(NamedTuple):
    """A part of an image in pixels, from edge to edge, and the size in pixels that it is resized to.

    If that size is smaller than the output, the part is centred on black.
    """

    left: float
    top: float
    right: float
    bottom: float
    height: int
    width: int
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    @property
    def scale(self) -> float:
        """The larger of the two factors by which the part is resized."""
        return max(self.height / (self.bottom - self.top), self.width / (self.right - self.left))


class Crop(NamedTuple):
    """The part of an image that is shown: all of it, its centre, all of it on black, or a part that ``numbers`` choose.

    A crop can be sent to another process before the size of the image is known, and is called with that size there.
    """

    kind: Resize | Literal["random"] = "stretch"
    fraction: float = 1.0  # of the largest box of the output's shape, for ``crop``
    numbers: Sequence[float] = ()  # four in [0, 1), for ``random``
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    def __call__(self, image: Size, output: Size) -> CropBox:
        """Return the box in an image of the height and width ``image`` that is resized to the size ``output``."""
        height, width = output
        left, top, right, bottom = 0.0, 0.0, float(image[1]), float(image[0])
        if self.kind == "random":
            left, top, right, bottom = map(float, _edges(image, self.numbers))
        elif self.kind == "crop":
            # The largest box that has the shape of the output, made smaller around its centre. The product may be
            # rounded to a little more than the side: a box must not begin before the first pixel.
            scale = self.fraction * min(image[0] / height, image[1] / width)
            box_height, box_width = min(height * scale, image[0]), min(width * scale, image[1])
            top, left = (image[0] - box_height) / 2, (image[1] - box_width) / 2
            right, bottom = left + box_width, top + box_height
        elif self.kind == "pad":
            scale = min(height / image[0], width / image[1])
            height, width = (max(1, round(side * scale)) for side in image)
        return CropBox(left, top, right, bottom, height, width, self.interpolation, self.resizer)


STRETCH = Crop()
"""The whole image, distorted to the output."""


@dataclass(frozen=True)
class Cropping:
    """Rule by which the crop boxes of a data set are chosen.

    ``stretch`` shows the whole image, distorted to the output. ``crop`` shows the ``crop_fraction`` around its centre
    without distortion. ``pad`` shows the whole image without distortion, on black. With ``crop_seed``, a training image
    shows another random part in each epoch.

    Example: ``Cropping("crop", crop_fraction=0.875)``, or ``Cropping(crop_seed=0).crops(draws, epoch=3)``
    """

    resize: Resize = "stretch"
    crop_fraction: float = 1.0
    crop_seed: int | None = None
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"

    @property
    def crop(self) -> Crop:
        """The crop of an image that is not cropped at random."""
        return Crop(self.resize, self.crop_fraction, (), self.interpolation, self.resizer)

    def crops(self, draws: Int64s, epoch: int) -> list[Crop]:
        """Return the crop of each of ``draws``, int64 (n,), in ``epoch``: ``Cropping(crop_seed=0).crops(draws, 3)``."""
        if self.crop_seed is None:
            return [self.crop] * len(draws)
        rows = crop_numbers(self.crop_seed, epoch, draws).tolist()
        return [Crop("random", 1.0, numbers, self.interpolation, self.resizer) for numbers in rows]


STRETCHED = Cropping()
"""Whole images, distorted to the output."""


def crop_numbers(seed: int, epoch: int, draws: Int64s) -> Floats:
    """Return the random numbers that choose a part of each of ``draws`` in ``epoch``, float64 (n, 4)."""
    return uniform(mix(seed, epoch, _CROP_STREAM), draws, _NUMBERS_PER_CROP)


def crop_boxes(image: Size, numbers: Floats) -> Floats:
    """Return left, top, right and bottom of one box for each row of ``numbers``, in pixels, float64 (n, 4).

    The rows of ``numbers``, float64 (n, 4), are uniform in [0, 1), such as those of :func:`crop_numbers`. A box has 8 %
    to 100 % of the area and an aspect ratio of 3:4 to 4:3 (Szegedy et al. 2015). It is that of torchvision's
    RandomResizedCrop, except that a side longer than the image is cut to the image instead of drawn again, and that a
    box may start between two pixels.
    """
    return np.stack(_edges(image, numbers.T), axis=1)


def _edges(image: Size, numbers: Sequence[Any] | Floats) -> tuple[Any, ...]:
    """Return left, top, right and bottom of one box, for four floats, or of n boxes, for an array (4, n).

    A single box gets floats, because an array with n = 1 takes 40 µs longer.
    """
    height, width = image
    area = height * width * (_MIN_AREA + (1 - _MIN_AREA) * numbers[_AREA])
    aspect = np.exp((2 * numbers[_ASPECT] - 1) * _LOG_ASPECT)
    box_height = np.minimum(np.sqrt(area / aspect), height)
    box_width = np.minimum(np.sqrt(area * aspect), width)
    top = numbers[_TOP] * (height - box_height)
    left = numbers[_LEFT] * (width - box_width)
    return left, top, left + box_width, top + box_height


def cut(image: Pixels | Any, box: CropBox, size: Size) -> Pixels:
    """Cut ``box`` out of decoded pixels, uint8 (h, w, C), or of a Pillow image, and resize it to uint8 (H, W, C).

    ``size`` is (H, W). A Pillow image is resized by Pillow, whichever library the box names.
    """
    # If the whole image is wanted in the size that it has, there is nothing to do. The first four values of a box are
    # its edges, the next two the size that it is resized to.
    is_array = isinstance(image, np.ndarray)
    width, height = image.shape[1::-1] if is_array else image.size
    if is_array and (height, width) == size and box[:6] == (0, 0, width, height, height, width):
        return image
    from PIL import Image

    # Do not copy what is not seen. The box moves along with the remaining part, in whose first pixel it now begins.
    seen: Any = image
    if box[:4] != (0, 0, width, height):
        left, top = math.floor(box.left), math.floor(box.top)
        right, bottom = math.ceil(box.right), math.ceil(box.bottom)
        seen = image[top:bottom, left:right] if is_array else image.crop((left, top, right, bottom))
        box = box._replace(left=box.left - left, top=box.top - top, right=box.right - left, bottom=box.bottom - top)

    # Resize it. The part has whole pixels, so the resizers also get the exact edges of the box within it.
    if is_array and box.resizer == "cykooz" and box.interpolation == "bilinear":
        resized = _resize_fast(seen, box)
    else:  # Pillow; also for bicubic, since the other library's pixels differ from Pillow's by 2 of 255
        if is_array:
            seen = np.ascontiguousarray(seen)
            seen = Image.fromarray(seen[:, :, 0] if seen.shape[2] == 1 else seen)
        inside = (max(box.left, 0), max(box.top, 0), min(box.right, seen.width), min(box.bottom, seen.height))
        if seen.size != (box.width, box.height) or inside != (0, 0, *seen.size):
            seen = seen.resize((box.width, box.height), Image.Resampling[box.interpolation.upper()], inside)
        resized = np.asarray(seen, dtype=np.uint8).reshape(box.height, box.width, -1)

    # Centre a box that is smaller than the output on black.
    if resized.shape[:2] == size:
        return resized
    output = np.zeros((*size, resized.shape[2]), np.uint8)
    top, left = (size[0] - box.height) // 2, (size[1] - box.width) // 2
    output[top : top + box.height, left : left + box.width] = resized
    return output


def fastest_resizer() -> Resizer:
    """Return the fastest library for resizing images that this Python has; nothing is imported."""
    return "cykooz" if find_spec("cykooz_resizer") else "pillow"


def _resize_fast(pixels: Pixels, box: CropBox) -> Pixels:
    """Resize the ``box`` of decoded pixels, uint8 (h, w, C), bilinearly and in a third of Pillow's time.

    Returns uint8 (box.height, box.width, C). Raises UsageError if the library is not installed.
    """
    height, width, channels = pixels.shape
    try:
        import cykooz_resizer as cykooz
    except ImportError:
        raise UsageError(
            "--resizer cykooz: this node has no cykooz-resizer, with which the run began; install it there "
            f"(`{pip_install('cykooz-resizer')}`), or resume with --resizer pillow, which changes pixels by 1 of 255."
        ) from None

    # The library takes and returns bytes, one pixel after another.
    kind = cykooz.PixelType.U8 if channels == 1 else cykooz.PixelType.U8x3
    left, top = max(box.left, 0.0), max(box.top, 0.0)
    # A little less than the size of the box: it is refused if left + width, rounded up, is beyond the image's edge.
    box_size = min(box.right, width) - left - ROUNDING, min(box.bottom, height) - top - ROUNDING
    output = cykooz.ImageData(box.width, box.height, kind)
    cykooz.Resizer().resize(
        cykooz.ImageData(width, height, kind, pixels.tobytes()),
        output,
        cykooz.ResizeOptions(
            cykooz.ResizeAlg.convolution(cykooz.FilterType.bilinear),
            use_alpha=False,
            crop_box=cykooz.CropBox(left, top, *box_size),
        ),
    )
    return np.frombuffer(output.get_buffer(), np.uint8).reshape(box.height, box.width, channels)
