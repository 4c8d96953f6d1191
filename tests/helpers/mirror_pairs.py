"""Images beside their mirror images, and a run that was trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

import raytrain
from raytrain.training.networks.model import build_model
from tests.helpers.stored_runs import ANIMALS, add_checkpoint, make_run, options


def add_run(storage: Path, **given: Any) -> dict[str, Any]:
    """A run whose network has random weights; the arguments that open it."""
    config = options(**given)
    add_checkpoint(make_run(storage, config), build_model(config.model, len(ANIMALS), 1, 0), config)
    return {"run": "first", "storage": str(storage)}


def mirror_pairs(folder: Path) -> Path:
    """Grey noise of three classes, each image with its mirror image."""
    random = np.random.default_rng(0)
    for name in ANIMALS:
        (folder / name).mkdir(parents=True)
        for number in range(4):
            image = Image.fromarray(random.integers(0, 256, (20, 12), dtype=np.uint8))
            image.save(folder / name / f"{number}-a.png")
            image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / name / f"{number}-b.png")
    return folder


def scores_of_pairs(images: Path, **given: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What is predicted for the images, and for their mirror images."""
    file = images.parent / "predictions.parquet"
    raytrain.predict(data=str(images), output=str(file), **given)
    rows = pq.read_table(file).to_pylist()
    columns = [name for name in rows[0] if name.startswith("score")]
    scores = np.array([[row[name] for name in columns] for row in rows])
    return scores[::2], scores[1::2]
