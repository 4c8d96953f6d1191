"""What a worker writes after an evaluation, and what `raytrain evaluate` returns, made by hand."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from raytrain.inference.classification_metrics import LabelEvaluation, LabelScore

HOSTILE_NAME = "<img src=x onerror=alert(1)>\x1b[31m[red]\u202e"


def png_url(height: int, width: int) -> str:
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def label_evaluation(name: str) -> LabelEvaluation:
    """An evaluation of three images that may have several classes, of which one is called ``name``."""
    return LabelEvaluation(
        run="first",
        data="d",
        checkpoint="c",
        skipped=0,
        images=3,
        accuracy=0.5,
        loss=0.5,
        mean_average_precision=0.5,
        macro_f1=None,
        per_class=(LabelScore(name, 3, None, 0.5, None, 1.0),),
    )


def evaluation(step: int) -> dict[str, Any]:
    """Two classes, two images that are taken for the other class, one of the last batch, and confusions."""
    worst = [{"image": png_url(28, 28), "label": 0, "prediction": 1, "probability": 0.9}] * 2
    batch = [{"image": png_url(28, 20), "label": 1, "prediction": 1, "probability": None}]
    confusion = [[0, 0, 7], [0, 1, 2], [1, 1, 9]]
    return {"step": step, "classes": ["cat", "dog"], "worst": worst, "batch": batch, "confusion": confusion}
