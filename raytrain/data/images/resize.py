"""Cuts a crop box out of an image and resizes it, by one of two libraries."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain.config.extras import pip_install
from raytrain.config.network import Resizer, Size
from raytrain.data.images.crop_box import CropBox
from raytrain.errors import UsageError

Pixels = npt.NDArray[np.uint8]

ROUNDING = 1e-6  # pixels


def fastest_resizer() -> Resizer:
    """Return the fastest library for resizing images that this Python has."""
    return "cykooz" if find_spec("cykooz_resizer") else "pillow"


def cut(image: Pixels | Any, box: CropBox, size: Size) -> Pixels:
    """Return the crop box of decoded pixels, uint8 (h, w, C), or of an image of Pillow, as uint8 (H, W, C) of ``size``.

    Images of Pillow are resized by Pillow, whatever the box says.
    """
    # Pixels of which all is seen, in the size that they have, are the result.
    is_array = isinstance(image, np.ndarray)
    width, height = image.shape[1::-1] if is_array else image.size
    if is_array and (height, width) == size and box[:6] == (0, 0, width, height, height, width):
        return image
    from PIL import Image

    # What is not seen is not copied. The box moves with the part that is left: it then begins within its first pixel.
    seen: Any = image
    if box[:4] != (0, 0, width, height):
        left, top = math.floor(box.left), math.floor(box.top)
        right, bottom = math.ceil(box.right), math.ceil(box.bottom)
        seen = image[top:bottom, left:right] if is_array else image.crop((left, top, right, bottom))
        box = box._replace(left=box.left - left, top=box.top - top, right=box.right - left, bottom=box.bottom - top)

    # Resize it. The part has whole pixels, so the resizers also get the exact edges of the box within it.
    if is_array and box.resizer == "cykooz" and box.interpolation == "bilinear":
        resized = _resize_fast(seen, box)
    else:  # Pillow; bicubic pixels of the fast resizer differ from Pillow's by 2
        if is_array:
            seen = np.ascontiguousarray(seen)
            seen = Image.fromarray(seen[:, :, 0] if seen.shape[2] == 1 else seen)
        inside = (max(box.left, 0), max(box.top, 0), min(box.right, seen.width), min(box.bottom, seen.height))
        if seen.size != (box.width, box.height) or inside != (0, 0, *seen.size):
            seen = seen.resize((box.width, box.height), Image.Resampling[box.interpolation.upper()], inside)
        resized = np.asarray(seen, dtype=np.uint8).reshape(box.height, box.width, -1)

    # A box that is smaller than the image to be made is centred on black.
    if resized.shape[:2] == size:
        return resized
    output = np.zeros((*size, resized.shape[2]), np.uint8)
    top, left = (size[0] - box.height) // 2, (size[1] - box.width) // 2
    output[top : top + box.height, left : left + box.width] = resized
    return output


def _resize_fast(pixels: Pixels, box: CropBox) -> Pixels:
    """Resize the ``box`` of decoded pixels, uint8 (h, w, C), bilinearly and in a third of Pillow's time."""
    height, width, channels = pixels.shape
    try:
        import cykooz_resizer as cykooz
    except ImportError:
        raise UsageError(
            "--resizer cykooz: this node has no cykooz-resizer, with which the run began; install it there "
            f"(`{pip_install('cykooz-resizer')}`), or resume with --resizer pillow, which changes pixels by 1 of 255."
        ) from None

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
