"""Images as PNGs in data URLs, as the documents of a run hold them."""

from __future__ import annotations

import base64
import io

from raytrain.data.images.crop_box import Pixels


def png_url(pixels: Pixels) -> str:
    """Return an image, uint8 (H, W, C) with C of 1 or 3, as a data URL.

    Example:
        >>> png_url(np.zeros((8, 8, 3), np.uint8))[:22]
        'data:image/png;base64,'
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
