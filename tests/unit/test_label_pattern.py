"""`--label-pattern`: classes from the names of files, for all parts, and files that do not match are counted."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from raytrain.data.dataset import Dataset, label_columns, open_dataset, write_manifests
from raytrain.data.labels.label_pattern import table_by_pattern
from raytrain.data.labels.labelled_images import images_of_part
from raytrain.datasets.pack import pack
from raytrain.errors import UsageError
from raytrain.recipes import custom
from raytrain.runs.documents import run_store
from raytrain.storage.open import open_store

PATTERN = r"(?P<label>.+)_\d+\.jpg"
FORMAT: dict[str, Any] = {"image_size": 8, "mean": (0.5,) * 3, "std": (0.2,) * 3}  # so that no image is decoded


def photos(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (len(name) % 255, 90, 9)).save(folder / name, "jpeg")
    return folder


def many(*classes: str, number: int = 10, below: str = "") -> list[str]:
    return [f"{below}{name}_{index}.jpg" for name in classes for index in range(number)]


def opened(data: Path, pattern: str = PATTERN, **options: Any) -> Dataset:
    return open_dataset(custom(data=str(data), label_pattern=pattern, **FORMAT, **options))


def counts(images: Any) -> Counter[str]:
    return Counter(images.classes[label] for label in images.labels)


def refused(data: Path, pattern: str = PATTERN, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        opened(data, pattern, **options)
    return str(error.value)


def test_the_group_label_is_the_class(tmp_path: Path) -> None:
    data = opened(photos(tmp_path, *many("great_pyrenees", "boxer")), validation_fraction=0.2)
    assert counts(data.train) == {"great_pyrenees": 8, "boxer": 8}
    assert counts(data.validation) == {"great_pyrenees": 2, "boxer": 2}


def test_without_one_it_is_the_first_group_as_in_fastai(tmp_path: Path) -> None:
    photos(tmp_path, *(f"{name}.{index}.jpg" for name in ("cat", "dog") for index in range(10)))
    assert set(opened(tmp_path, r"^(\w+)\.").train.classes) == {"cat", "dog"}


def test_folders_still_say_what_is_held_out_and_each_place_is_read(tmp_path: Path) -> None:
    photos(tmp_path / "a", *many("cat", "dog", below="train/"), *many("cat", "dog", number=3, below="val/"))
    data = opened(tmp_path / "a")
    assert (counts(data.train), counts(data.validation)) == ({"cat": 10, "dog": 10}, {"cat": 3, "dog": 3})
    photos(tmp_path / "b", *many("cat", "dog", number=2))
    photos(tmp_path / "c", *many("cat", "dog", number=4))
    photos(tmp_path / "d", *many("cat", "dog"))
    places = {"validation_data": str(tmp_path / "b"), "test_data": str(tmp_path / "c")}
    data = opened(tmp_path / "d", **places)
    assert data.test is not None
    assert [len(images) for images in (data.train, data.validation, data.test)] == [20, 4, 8]
    photos(tmp_path / "b", "cow_1.jpg")
    assert "cow" in refused(tmp_path / "d", **places)


def test_a_pattern_with_a_slash_is_searched_in_the_path_and_its_groups_are_columns(tmp_path: Path) -> None:
    names = [f"p{patient}/{name}/{index}.jpg" for patient in range(6) for name in ("ill", "well") for index in range(2)]
    photos(tmp_path, *names)
    data = opened(tmp_path, r"(?P<patient>p\d)/(?P<label>\w+)/", group_by="patient", validation_fraction=0.4)
    parts = [{key.split("/")[0] for key in images.keys.to_pylist()} for images in (data.train, data.validation)]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == {f"p{patient}" for patient in range(6)}
    photos(
        tmp_path / "split", *[f"{kind}-{name}" for kind in ("train", "val") for name in many("cat", "dog", number=4)]
    )
    data = opened(tmp_path / "split", r"(?P<split>\w+)-(?P<label>\w+)_")
    assert (len(data.train), len(data.validation)) == (8, 8)


def test_files_that_do_not_match_are_refused_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos(tmp_path, *many("cat", "dog"), "portrait.jpg", "other.jpg")
    sentence = refused(tmp_path)
    assert "2 of 22 images below" in sentence and "'other.jpg', 'portrait.jpg'; it is searched in" in sentence
    with caplog.at_level(logging.WARNING):
        data = opened(tmp_path, max_bad_fraction=0.1)
    assert len(data.train) + len(data.validation) == 20
    assert "2 of 22 images below" in caplog.text and "they are not used" in caplog.text
    assert data.train.left_out["images that do not match --label-pattern"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"label_pattern": "(cat"}, "which is no regular expression (missing )"),
        ({"label_pattern": "cat"}, "which has no group that is the class"),
        ({"label_pattern": PATTERN, "labels": "labels.csv"}, "--label-pattern and --labels both say the classes"),
        ({"label_pattern": PATTERN, "group_by": "patient"}, "has no group of this name"),
        ({"label_pattern": PATTERN, "key_column": "file"}, "--key-column is for the label file"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as error:
        custom(data="photos", **options)
    assert says in str(error.value)


def test_a_run_that_resumes_does_not_list_the_images_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "images", *many("cat", "dog"))
    config = custom(data=str(tmp_path / "images"), label_pattern=PATTERN, **FORMAT)
    data, store = open_dataset(config), run_store(str(tmp_path), "first")
    write_manifests(store, data.train, data.validation)
    photos(tmp_path / "images", "cat_99.jpg")
    again = open_dataset(config, store)
    assert again.train is again.stored and len(again.train) == len(data.train)
    other = open_dataset(replace(config, label_pattern=r"^(\w+)_"), store)
    assert other.train is not other.stored


def test_evaluate_and_pack_take_the_same_labels(tmp_path: Path) -> None:
    photos(tmp_path / "images", *many("cat", "dog"))
    store, config = open_store(str(tmp_path / "images")), custom(label_pattern=PATTERN)
    table = table_by_pattern(store, PATTERN, label_columns(config), 0.01)
    assert counts(images_of_part(store, table, "test", 0.01, ("cat", "dog"))) == {"cat": 10, "dog": 10}
    packed = pack(tmp_path / "images", tmp_path / "packed", label_pattern=PATTERN)
    assert (packed.num_images, packed.num_classes) == (20, 2)
    with pytest.raises(UsageError, match="no regular expression"):
        pack(tmp_path / "images", tmp_path / "more", label_pattern="(")
