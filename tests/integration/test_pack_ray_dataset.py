"""`raytrain.pack` of a ``ray.data.Dataset``: the shards hold its images and labels, in whatever order rows come."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
from PIL import Image
from rich.console import Console

import raytrain
from raytrain.data.images.fetch_and_decode import read_contents
from raytrain.data.labels.folders import build_manifest
from raytrain.errors import UsageError
from raytrain.storage.open import open_store
from tests.helpers.small_runs import make_images

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    context = ray.data.DataContext.get_current()
    shows, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = shows


def pack(dataset: Any, folder: Path, **options: Any) -> dict[str, tuple[str, bytes]]:
    """Pack ``dataset``; return the class and the file of each image, by key, as they are read from the shards."""
    raytrain.pack(dataset, folder, console=Console(file=io.StringIO()), **options)
    store = open_store(str(folder))
    manifest = build_manifest(store)
    rows = zip(manifest.keys.to_pylist(), manifest.labels, read_contents(store, manifest), strict=True)
    return {key: (manifest.classes[label], bytes(content)) for key, label, content in rows}  # pyright: ignore


def random_pixels(*sizes: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (8, width, 3), np.uint8) for width in sizes]


def pixels(file: bytes) -> bytes:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).tobytes()


@pytest.mark.parametrize("sizes", [(9, 9, 9, 9), (9, 7, 8, 9)])
def test_arrays_and_numbers(sizes: Sequence[int], tmp_path: Path) -> None:
    """Arrays of one size are one column of Arrow to Ray, those of several sizes another."""
    arrays = random_pixels(*sizes)
    rows = [{"image": array, "label": number % 2} for number, array in enumerate(arrays)]
    found = pack(ray.data.from_items(rows), tmp_path / "packed")
    assert {(label, pixels(file)) for label, file in found.values()} == {
        (str(number % 2), array.tobytes()) for number, array in enumerate(arrays)
    }


def test_the_bytes_of_files_in_any_order_are_the_same_shards(tmp_path: Path) -> None:
    files = [file.read_bytes() for file in sorted(make_images(tmp_path, 12).rglob("*.png"))]
    rows = [{"img": file, "class": "ab"[number % 2]} for number, file in enumerate(files)]
    rows += [rows[0], {"img": files[0], "class": None}]  # twice, and without a label
    found = pack(ray.data.from_items(rows), tmp_path / "packed")
    assert sorted(found.values()) == sorted((row["class"], row["img"]) for row in rows[:-1])
    again = raytrain.pack(ray.data.from_items(rows[::-1]), tmp_path / "packed", console=Console(file=io.StringIO()))
    assert (again.num_images, again.num_classes, again.num_written, again.source) == (13, 2, 0, "ray.data.Dataset")


def test_a_path_beside_an_image_is_its_key_and_a_split_is_chosen(tmp_path: Path) -> None:
    images = make_images(tmp_path, 12)

    def with_labels(row: dict[str, Any]) -> dict[str, Any]:
        path = Path(row["path"])
        return {**row, "species": path.parent.name, "split": "test" if path.stem == "000" else "train"}

    dataset = ray.data.read_images(str(images), include_paths=True, override_num_blocks=1).map(with_labels)
    with pytest.raises(UsageError, match=r"ray.data.Dataset has the splits test, train"):
        pack(dataset, tmp_path / "packed", label_column="species")
    found = pack(dataset, tmp_path / "packed", label_column="species", split="train", shorter_side=8)
    assert {"/".join(key.split("/")[-2:]): label for key, (label, _) in found.items()} == {
        f"{file.parent.name}/{file.name}": file.parent.name for file in images.rglob("*.png") if file.stem != "000"
    }


def test_what_cannot_be_packed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (array,) = random_pixels(9)
    file = b"\x89PNG"

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such species")

    bad: list[tuple[list[dict[str, Any]], str]] = [
        (
            [{"picture": file, "label": 1}],
            "none of image, .* among its columns picture, label",
        ),
        ([{"image": file, "kind": 1}], "has none of label, .* name the right one with --label-column"),
        ([{"image": array / 255, "label": 1}], r"holds an array of float64 and the shape \(8, 9, 3\), and the bytes"),
        ([{"image": array.transpose(2, 0, 1), "label": 1}], r"holds an array of uint8 and the shape \(3, 8, 9\)"),
        ([{"image": "red/1.png", "label": 1}], "holds a str, and the bytes of image files"),
        ([{"image": file, "label": [1, 2]}], "'label' of the ray.data.Dataset .* one class per image"),
        (
            [{"image": file, "label": np.eye(2)[0]}],
            "'label' of the ray.data.Dataset .* one class per image",
        ),
        ([{"image": array[:0], "label": 1}], "There are no labelled images in ray.data.Dataset"),
        ([{"image": None, "label": 1}], "There are no labelled images in ray.data.Dataset"),
        ([], "There are no labelled images in ray.data.Dataset"),
    ]
    for rows, sentence in bad:
        with pytest.raises(UsageError, match=sentence) as refused:
            raytrain.pack(ray.data.from_items(rows), tmp_path / "packed")
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match=r"rows of the ray.data.Dataset cannot be read \(.*no such species\)\.$"):
        raytrain.pack(ray.data.from_items([{"image": file, "label": 1}]).map(fail), tmp_path / "packed")
    with pytest.raises(UsageError, match=r"--labels, .* are for images in folders; those in ray.data.Dataset have one"):
        raytrain.pack(ray.data.from_items([{"image": file, "label": 1}]), tmp_path / "packed", labels="labels.csv")
    with pytest.raises(UsageError, match=r"got a builtins.list; give a folder, a URL or a ray.data.Dataset"):
        raytrain.pack([file], tmp_path / "packed")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "packed").exists()
