"""A network of timm learns images with several classes: trained, evaluated, and used on new images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

import raytrain
from raytrain import TrainConfig
from raytrain.inference.classification_metrics import LabelEvaluation

COLOURS = ("blue", "green", "red")


def write_images(folder: Path, seed: int, num_images: int) -> dict[str, list[str]]:
    """Write noise in which each colour is bright or not, and return the bright ones of each image."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    bright = random.random((num_images, 3)) < 0.5
    for number, channels in enumerate(bright):
        pixels = random.integers(0, 100, (32, 32, 3)) + 120 * channels[::-1]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.png")
    return {
        f"{number:03d}.png": [name for name, has in zip(COLOURS, row, strict=True) if has]
        for number, row in enumerate(bright.tolist())
    }


def write_labels(file: Path, colours: dict[str, list[str]]) -> str:
    table = pa.table({"key": list(colours), "label": ["|".join(names) for names in colours.values()]})
    pyarrow.csv.write_csv(table, file)
    return str(file)


def test_a_network_of_timm_learns_which_colours_are_bright(tmp_path: Path) -> None:
    train, new = (write_images(tmp_path / name, seed, 80) for seed, name in enumerate(("train", "new")))
    config = TrainConfig(
        name="colours",
        data=str(tmp_path / "train"),
        labels=write_labels(tmp_path / "train.csv", train),
        label_separator="|",
        storage=str(tmp_path / "runs"),
        model="timm:test_resnet",
        image_size=(32, 32),
        batch_size=12,
        epochs=4,
        optimizer="adamw",
        learning_rate=0.003,
        workers=2,
        backend="local",
        test_views=("flip",),
    )
    result = raytrain.train(config)
    assert (result.status, result.steps) == ("finished", 24)

    place: dict[str, Any] = {"storage": str(tmp_path / "runs")}
    measured = raytrain.evaluate(
        "colours", str(tmp_path / "new"), labels=write_labels(tmp_path / "new.csv", new), **place
    )
    assert isinstance(measured, LabelEvaluation) and measured.images == 80
    assert measured.mean_average_precision is not None and measured.mean_average_precision > 0.95
    assert measured.accuracy is not None and measured.accuracy > 0.9

    raytrain.predict("colours", str(tmp_path / "new"), str(tmp_path / "out.parquet"), **place)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    predicted = {row["key"]: {name for name in row["labels"].split("|") if name} for row in rows}
    right = sum((name in predicted[key]) == (name in names) for key, names in new.items() for name in COLOURS)
    assert right / (3 * len(new)) == pytest.approx(measured.accuracy)
