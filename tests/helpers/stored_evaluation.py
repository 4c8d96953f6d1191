"""What a worker writes after an evaluation, made by hand."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

HOSTILE_NAME = "<img src=x onerror=alert(1)>\x1b[31m[red]\u202e"


def png_url(height: int, width: int) -> str:
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def evaluation(step: int) -> dict[str, Any]:
    """Two classes, two images that are taken for the other class, one of the last batch, and confusions."""
    worst = [{"image": png_url(28, 28), "label": 0, "prediction": 1, "probability": 0.9}] * 2
    batch = [{"image": png_url(28, 20), "label": 1, "prediction": 1, "probability": None}]
    confusion = [[0, 0, 7], [0, 1, 2], [1, 1, 9]]
    return {"step": step, "classes": ["cat", "dog"], "worst": worst, "batch": batch, "confusion": confusion}
