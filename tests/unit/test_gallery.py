"""What whoever watches sees of an evaluation: exact confusions, and the images with the largest loss."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from raytrain.recipes import digits
from raytrain.runs.documents import EVALUATION, read_json
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.training.batches.batch import Batch
from raytrain.training.metrics.gallery import Gallery, screen_pixels
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import config

CLASSES = ("a", "b", "c")


def gallery(store: Store, classes: tuple[str, ...] = CLASSES) -> Gallery:
    options = digits(data="images").resolve(name="run", num_workers=1, device="cpu", mean=(0.5,), std=(0.25,))
    return Gallery(options, classes, store, report=lambda text: None)


def batch(labels: list[int], first_sample: int = 0, side: int = 4) -> Batch:
    size = len(labels)
    images = torch.linspace(-2, 2, size * side * side).reshape(size, 1, side, side)
    samples = torch.arange(first_sample, first_sample + size)
    truth = torch.tensor(labels)
    return Batch(images, truth, truth, samples, 0, 0, size, (size,))


def written(store: Store) -> dict[str, Any]:
    return read_json(store, EVALUATION)


def pixels(example: dict[str, Any]) -> np.ndarray[Any, Any]:
    data = base64.b64decode(example["image"].removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)))


def test_the_confusions_count_each_image_once_and_the_worst_come_first(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    shown = gallery(store)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (100,), generator=generator)
    logits = torch.randn(100, 3, generator=generator)
    for first in range(0, 100, 30):
        shown.add(batch(labels[first : first + 30].tolist(), first), logits[first : first + 30])
    shown.write(7, rank=0, world_size=1)
    shown.close()
    document = written(store)
    pairs = list(zip(labels.tolist(), logits.argmax(dim=1).tolist(), strict=True))
    assert sorted(document["confusion"]) == sorted([*pair, pairs.count(pair)] for pair in set(pairs))
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert [example["sample"] for example in document["worst"]] == losses.argsort(descending=True)[:16].tolist()
    assert (document["step"], document["classes"]) == (7, list(CLASSES))


def test_images_are_shown_as_they_were_before_they_were_normalised(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    shown = gallery(store)
    images = batch([0, 1])
    shown.remember(images, torch.tensor([[5.0, 0, 0], [5.0, 0, 0]]))
    shown.add(batch([1], side=200), torch.zeros(1, 3))
    shown.write(1, rank=0, world_size=1)
    shown.close()
    first, second = written(store)["batch"]
    expected = ((images.images[0, 0] * 0.25 + 0.5).clamp(0, 1) * 255).round().byte().numpy()
    assert np.array_equal(pixels(first), expected)
    assert (first["label"], first["prediction"], second["label"], second["prediction"]) == (0, 0, 1, 0)
    assert pixels(written(store)["worst"][0]).shape == (96, 96)


def test_answers_that_are_not_finite_break_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    shown = gallery(store)
    shown.add(batch([0, 1]), torch.tensor([[float("nan")] * 3, [0.0, 9.0, 0.0]]))
    shown.write(1, rank=0, world_size=1)
    shown.close()
    assert [example["sample"] for example in written(store)["worst"]] == [0, 1]
    assert written(store)["worst"][0]["probability"] is None


def test_too_many_classes_have_no_matrix_but_worst_images(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    shown = gallery(store, tuple(map(str, range(1001))))
    shown.add(batch([1000]), torch.zeros(1, 1001))
    shown.write(1, rank=0, world_size=1)
    shown.close()
    assert written(store)["confusion"] == []
    assert len(written(store)["worst"]) == 1


def _on_each_worker(folder: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shown = gallery(open_store(folder))
    if rank < 2:  # the third worker has no validation images
        shown.add(batch([0, 1], first_sample=2 * rank), torch.tensor([[0.0, 1.0 + rank, 0.0], [0.0, 1.0, 0.0]]))
    shown.write(1, rank, world_size)
    shown.close()


@pytest.mark.not_quick
def test_the_workers_put_together_what_each_has_seen(tmp_path: Path) -> None:
    run_in_processes(3, _on_each_worker, str(tmp_path))
    document = written(open_store(str(tmp_path)))
    assert sorted(document["confusion"]) == [[0, 1, 2], [1, 1, 2]]
    assert [example["sample"] for example in document["worst"]][:2] == [2, 0]


@pytest.mark.parametrize("shape", [(8, 1000), (1000, 8), (50, 100), (28, 28)])
def test_images_are_shown_in_a_size_that_has_pixels(shape: tuple[int, int]) -> None:
    shown = screen_pixels(torch.zeros(2, 3, *shape), config(), 96)
    height, width = shown.shape[1:3]
    assert min(height, width) > 0 and max(height, width) == min(96, max(shape))
