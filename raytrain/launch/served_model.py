"""A model that is served over HTTP: its network, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain.data.images.image_format import ImageFormat
from raytrain.launch.predict_blocks import LoadPredictor
from raytrain.storage.store import Store


@dataclass(frozen=True)
class ServedModel:
    """The network of ``run``, loaded from ``store``, which answers requests with the ``top_k`` likeliest classes.

    ``checkpoint`` names the file of its weights, and ``format`` says how an image is decoded for it. ``thresholds`` has
    the probability of each class from which on an image has it; None if an image has one class.
    """

    run: str
    checkpoint: str
    classes: tuple[str, ...]
    format: ImageFormat
    store: Store
    load_predictor: LoadPredictor
    top_k: int
    thresholds: tuple[float, ...] | None = None

    def answer(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, to be sent as JSON, for a row of the predictor's table.

        It has ``label`` and ``score`` of the likeliest class, or ``labels`` if an image may have several; and
        ``classes``, the ``top_k`` likeliest ones.
        """
        # One class per image: the predictor's columns are label and score, label_2 and score_2, and so on.
        if self.thresholds is None:
            suffixes = ["", *(f"_{rank}" for rank in range(2, self.top_k + 1))]
            likeliest = [{"label": row[f"label{suffix}"], "score": row[f"score{suffix}"]} for suffix in suffixes]
            return {**likeliest[0], "classes": likeliest}
        # Several classes per image: labels are those that reach their thresholds, classes the likeliest ones.
        scores = zip(self.classes, row["probabilities"], self.thresholds, strict=True)
        ranked = [
            {"label": label, "score": score, "threshold": threshold}
            for label, score, threshold in sorted(scores, key=lambda scored: scored[1], reverse=True)
        ]
        labels = [scored["label"] for scored in ranked if scored["score"] >= scored["threshold"]]
        return {"labels": labels, "classes": ranked[: self.top_k]}
