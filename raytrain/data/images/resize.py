"""Cuts a crop box out of decoded pixels and resizes it, by one of two libraries."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.config.network import Resizer, Size
from raytrain.data.images.crop_box import CropBox
from raytrain.errors import UsageError

Pixels = npt.NDArray[np.uint8]

ROUNDING = 1e-6  # pixels
_NO_RESIZER = (
    "--resizer cykooz: this node has no cykooz-resizer, with which the run began; install it there (`pip install "
    "cykooz-resizer`), or resume with --resizer pillow, which changes pixels by 1 of 255."
)


def fastest_resizer() -> Resizer:
    """The fastest library for resizing images that this Python has."""
    return "cykooz" if find_spec("cykooz_resizer") else "pillow"


def cut(pixels: Pixels, box: CropBox, size: Size) -> Pixels:
    """The crop box of decoded pixels, uint8 (h, w, C), as an image of ``size``, uint8 (H, W, C)."""
    height, width = pixels.shape[:2]
    if (height, width) == size and box[:6] == (0, 0, width, height, height, width):
        return pixels
    from PIL import Image

    top, left = math.floor(box.top), math.floor(box.left)
    seen = pixels[top : math.ceil(box.bottom), left : math.ceil(box.right)]  # without a copy of what is not seen
    box = _moved(box, left, top)
    if box.resizer == "cykooz" and box.interpolation == "bilinear":  # its bicubic pixels differ from Pillow's by 2
        return _centred(_resize_fast(seen, box), size)
    seen = np.ascontiguousarray(seen)
    return _resize(Image.fromarray(seen[:, :, 0] if seen.shape[2] == 1 else seen), box, size)


def cut_image(image: Any, box: CropBox, size: Size) -> Pixels:
    """The crop box of an image of Pillow, resized by Pillow."""
    if (box.left, box.top, box.right, box.bottom) == (0, 0, *image.size):
        return _resize(image, box, size)
    left, top = math.floor(box.left), math.floor(box.top)
    seen = image.crop((left, top, math.ceil(box.right), math.ceil(box.bottom)))
    return _resize(seen, _moved(box, left, top), size)


def _moved(box: CropBox, left: int, top: int) -> CropBox:
    """The box as it lies in the part of the image that begins at ``left`` and ``top``."""
    return box._replace(left=box.left - left, top=box.top - top, right=box.right - left, bottom=box.bottom - top)


def _resize(image: Any, box: CropBox, size: Size) -> Pixels:
    """The ``box`` of an image of Pillow, resized by Pillow."""
    from PIL import Image

    inside = (max(box.left, 0), max(box.top, 0), min(box.right, image.width), min(box.bottom, image.height))
    if image.size != (box.width, box.height) or inside != (0, 0, *image.size):
        image = image.resize((box.width, box.height), Image.Resampling[box.interpolation.upper()], inside)
    return _centred(np.asarray(image, dtype=np.uint8).reshape(box.height, box.width, -1), size)


def _resize_fast(pixels: Pixels, box: CropBox) -> Pixels:
    """Resize the ``box`` of decoded pixels, uint8 (H, W, C), bilinearly and in a third of Pillow's time."""
    height, width, channels = pixels.shape
    try:
        import cykooz_resizer as cykooz
    except ImportError:
        raise UsageError(_NO_RESIZER) from None

    kind = cykooz.PixelType.U8 if channels == 1 else cykooz.PixelType.U8x3
    left, top = max(box.left, 0.0), max(box.top, 0.0)
    # A little less than all: a sum that rounds up is outside of the image.
    seen = min(box.right, width) - left - ROUNDING, min(box.bottom, height) - top - ROUNDING
    output = cykooz.ImageData(box.width, box.height, kind)
    cykooz.Resizer().resize(
        cykooz.ImageData(width, height, kind, pixels.tobytes()),
        output,
        cykooz.ResizeOptions(
            cykooz.ResizeAlg.convolution(cykooz.FilterType.bilinear),
            use_alpha=False,
            crop_box=cykooz.CropBox(left, top, *seen),
        ),
    )
    return np.frombuffer(output.get_buffer(), np.uint8).reshape(box.height, box.width, channels)


def _centred(pixels: Pixels, size: Size) -> Pixels:
    """Pixels on black, if they are fewer than those of ``size``."""
    height, width, channels = pixels.shape
    if (height, width) == size:
        return pixels
    output = np.zeros((*size, channels), np.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    output[top : top + height, left : left + width] = pixels
    return output
