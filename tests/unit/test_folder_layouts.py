"""Folders as people have them: right classes, no validation image in training, and nothing left out in silence."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import time
import unicodedata
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raytrain.config import TrainConfig
from raytrain.data.blocks import string_array
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.data.labels.folders import build_manifest, read_folders
from raytrain.data.labels.hold_out import hold_out
from raytrain.data.labels.label_columns import LabelColumns
from raytrain.data.labels.label_pattern import table_by_pattern
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store
from raytrain.storage.store import StoredObject


def png(number: int) -> bytes:
    """A small image that no other number has."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 7)).save(content, "PNG")
    return content.getvalue()


def fill(folder: Path, *paths: str, start: int = 0) -> Path:
    for number, path in enumerate(paths, start):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(png(number))
    return folder


def tree(folder: Path, *classes: str, count: int = 4) -> Path:
    return fill(folder, *(f"{name}/{number}.png" for name in classes for number in range(count)))


def opened(data: Path, test_data: Path | None = None, **options: Any) -> Dataset:
    config = TrainConfig(
        data=str(data),
        test_data=test_data and str(test_data),
        batch_size=2,
        learning_rate=1,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        **options,
    )
    return open_dataset(config, open_store(str(data.parent / "run")))


def counts(data: Dataset) -> dict[str, tuple[int, int]]:
    training, test = data.train.class_counts().tolist(), data.validation.class_counts().tolist()
    return dict(zip(data.train.classes, zip(training, test, strict=True), strict=True))


def test_the_class_is_the_topmost_folder(tmp_path: Path) -> None:
    manifest = build_manifest(open_store(str(tree(tmp_path / "a", "dog", "dog/golden", "cat", "cat/bengal"))))
    assert manifest.classes == ("cat", "dog") and manifest.class_counts().tolist() == [8, 8]


def test_folders_that_all_images_share_are_no_classes(tmp_path: Path) -> None:
    manifest = build_manifest(open_store(str(tree(tmp_path / "a", "data/images/dog", "data/images/cat/small"))))
    assert manifest.classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("folders", "first", "second"),
    [
        ("{}/{}", ("2024", "2025"), ("cat", "dog")),
        ("shared/{}/{}", ("cat", "dog"), ("001", "002")),
        ("{}/train/{} {}/test/{}", ("cat", "dog"), ("depth", "rgb")),
        ("{}/images/{}", ("amazon", "dslr"), ("bike", "mug")),
        ("{0}/{0}/{1}", ("Original Images", "Augmented Images"), ("cat", "dog")),
    ],
)
def test_folders_that_repeat_below_each_other_are_refused_with_the_patterns_of_both(
    folders: str, first: tuple[str, str], second: tuple[str, str], tmp_path: Path
) -> None:
    layouts = folders.split()
    tree(tmp_path / "a", *(layout.format(top, name) for layout in layouts for top in first for name in second))
    with pytest.raises(UsageError, match=r"all contain \w+, \w+, so that either may be the classes") as refused:
        build_manifest(open_store(str(tmp_path / "a")))
    match = re.search(r"--data (\S+) and --label-pattern '(.+)' for the former, or '(.+)' for", str(refused.value))
    assert match is not None
    for pattern, classes in zip(match.groups()[1:], (first, second), strict=True):
        table = table_by_pattern(open_store(match[1]), pattern, LabelColumns(), 0)
        assert set(table.labels) == {*classes} and any(table.splits) == (len(layouts) > 1)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "test"),
        ("Training", "Testing"),
        ("train", "eval"),
        ("training_set", "test_set"),
        ("train_images", "val_images"),
        ("data/train", "data/test"),
        ("train2019", "val2019"),
        ("train/images", "test/images"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("trainval", "test"),
        ("train_val", "test"),
        ("train_val2018", "test-dev2018"),
        ("crash test train", "crash test val"),
    ],
)
def test_training_and_test_folders_are_used_as_such(
    train: str, test: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path / "a", f"{train}/cat", f"{train}/dog", f"{test}/cat", count=3)
    data = opened(tmp_path / "a")
    assert counts(data) == {"cat": (3, 3), "dog": (3, 0)}
    assert "training on 6 in" in caplog.text and "validating on 3 in" in caplog.text
    with pytest.raises(UsageError, match="which would become one data set"):
        build_manifest(open_store(str(tmp_path / "a")))


def test_a_copy_further_down_and_an_image_beside_the_folders_hide_no_folders_that_repeat(tmp_path: Path) -> None:
    folder = fill(
        tree(tmp_path / "a", "Plants/fern", "Plants/moss", "plants/Plants/fern", "plants/Plants/moss"), "x.png"
    )
    with pytest.raises(UsageError, match=r"Plants, plants of .* all contain fern, moss, so that either") as refused:
        opened(folder)
    for pattern, classes in zip(str(refused.value).split("'")[1::2], ("Plants plants", "fern moss"), strict=True):
        assert {*table_by_pattern(open_store(str(folder)), pattern, LabelColumns(), 0.1).labels} == {*classes.split()}


@pytest.mark.parametrize("beside", ["", "more/cat"])
def test_data_sets_beside_each_other_are_no_classes(beside: str, tmp_path: Path) -> None:
    parts = [f"size {size}/size {size}/data/{part}" for size in (32, 64) for part in ("Training", "Test")]
    folder = tree(tmp_path / "a", *(f"{part}/{name}" for part in parts for name in ("cat", "dog")), *beside.split())
    with pytest.raises(
        UsageError, match=rf"no classes: the folders Test, Training are .* --data {folder}/size 32"
    ) as told:
        opened(folder)
    assert ("--label-pattern" in str(told.value)) == (beside == "")
    assert counts(opened(folder / "size 64")) == {"cat": (4, 4), "dog": (4, 4)}


def test_parts_further_down_in_each_class_are_refused_with_the_pattern_that_reads_them(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", *(f"{name}/photos/{part}" for name in ("cat", "dog") for part in ("train", "val")))
    with pytest.raises(UsageError, match=rf"or, if these are classes, --data {folder} --label-pattern '") as told:
        opened(folder)
    assert counts(opened(folder, label_pattern=str(told.value).split("'")[1])) == {"cat": (4, 4), "dog": (4, 4)}


@pytest.mark.parametrize("above", ["", "train_val2018/", "train/ val/"])
def test_classes_that_hold_folders_alone_are_told(above: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = ("Aves/2761", "Aves/3000", "Plantae/plants/1", "Plantae/plants/7477")
    data = opened(tree(tmp_path / "a", *(part + place for part in above.split(" ") for place in places)))
    assert data.train.classes == ("Aves", "Plantae")
    assert "are taken for the classes, and not the 4 folders in these, such as Aves/2761." in caplog.text
    caplog.clear()
    opened(tree(tmp_path / "b", "cat", "cat/bengal", "cat/manx", "dog/poodle", "dog/pug"))
    opened(tree(tmp_path / "c", "cat/1", "cat/2", "dog/photos", "owl/3/x", "owl/3/y"))
    assert "are taken for the classes" not in caplog.text


def test_training_and_test_folders_in_each_class_are_used_as_such(tmp_path: Path) -> None:
    tree(tmp_path / "a", "cat/train", "cat/test", "dog/train", "dog/test", count=3)
    assert counts(opened(tmp_path / "a")) == {"cat": (3, 3), "dog": (3, 3)}


def test_numbered_folders_of_one_part_are_used_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = ("train.X1/cat", "train.X2/dog", "val.X/cat", "val.X/dog")
    images = opened(tree(tmp_path / "parts", *places))
    assert images.train.class_counts().tolist() == images.validation.class_counts().tolist() == [4, 4]
    assert "The folders train.X1, train.X2 of" in caplog.text and "training on 8" in caplog.text

    # In folds, the second one may have the validation images of the first one for training.
    images = opened(
        tree(
            tmp_path / "folds",
            *(f"{part}{fold}/{name}" for part in ("train", "val") for fold in (1, 2) for name in ("cat", "dog")),
        )
    )
    assert len(images.train) == len(images.validation) == 8
    assert "Not used" in caplog.text and "8 images in train2/" in caplog.text


def test_two_kinds_of_training_images_are_refused_and_not_half_of_them_used(tmp_path: Path) -> None:
    places = [f"{part}/{name}" for part in ("train_sim", "train_real", "test_real") for name in ("cat", "dog")]
    tree(tmp_path / "a", *places)
    with pytest.raises(UsageError, match=r"training images, train_real, train_sim; .* --data \S+/train_real --valid"):
        opened(tmp_path / "a")
    places = [f"{part}/{name}" for part in ("train", "train_small", "val") for name in ("cat", "dog")]
    assert len(opened(tree(tmp_path / "b", *places)).train) == 8, "one of them says nothing but the part"


@pytest.mark.parametrize(
    "names",
    [("train", "val", "test"), ("training", "validation", "evaluation"), ("Training", "PublicTest", "PrivateTest")],
)
@pytest.mark.parametrize("layout", ["{part}/{name}", "{name}/{part}"])
def test_three_folders_are_three_parts(
    layout: str, names: tuple[str, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = opened(
        tree(tmp_path / "a", *(layout.format(part=part, name=name) for part in names for name in ("cat", "dog")))
    )
    for images, part in zip((data.train, data.validation, data.test), names, strict=True):
        assert images is not None and len(images) == 8
        assert all(part in key.split("/") for key in images.keys.to_pylist())
    train, validation, test = names
    shown = f"training on 8 in {train}/, validating on 8 in {validation}/, testing at the end on 8 in {test}/"
    assert shown in caplog.text


def test_a_folder_whose_name_says_two_parts_is_one_part(tmp_path: Path) -> None:
    places = [f"{part}/{name}" for part in ("train", "train_val", "val", "test-dev") for name in ("cat", "dog")]
    data = opened(tree(tmp_path / "a", *places))
    folders = [{key.partition("/")[0] for key in images.keys.to_pylist()} for _, images, _ in data.parts.values()]
    assert folders == [{"train"}, {"val"}, {"test-dev"}]


def test_classes_that_nothing_measures_are_reported_for_each_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path / "a" / "train", "cat", "dog", "owl")
    tree(tmp_path / "a" / "val", "cat", "dog")
    tree(tmp_path / "a" / "test", "owl")
    opened(tmp_path / "a")
    assert "Classes without a validation image" in caplog.text and "1 of 3 (owl)" in caplog.text
    assert "Classes without a test image" in caplog.text and "2 of 3 (cat, dog)" in caplog.text


def test_copies_of_training_images_are_reported_with_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tree(tmp_path / "a" / "train", "cat", "dog").parent
    fill(folder / "val", "cat/7.png", "dog/8.png", start=90)
    shutil.copy(folder / "train/cat/1.png", folder / "val/cat/1.png")
    opened(folder)
    assert (
        "1 of 3 validation images have the name and the size of a training image of their class; 1 of 1" in caplog.text
    )

    # A folder that is there twice, by a link.
    (tmp_path / "b").mkdir()
    for name in ("train", "test"):
        (tmp_path / "b" / name).symlink_to(folder / "train")
    opened(tmp_path / "b")
    assert (
        "8 of 8 validation images have the name and the size of a training image of their class; 8 of 8" in caplog.text
    )


def test_images_of_the_name_and_the_size_of_others_are_no_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start, part in enumerate(("train", "val")):
        fill(tmp_path / "a" / part, "cat/1.bmp", "cat/2.bmp", "dog/3.bmp", "dog/4.bmp", start=100 * start)
        for number, file in enumerate(sorted((tmp_path / "a" / part).rglob("*.bmp"))):
            Image.new("RGB", (8, 8), (start, number, 0)).save(file)
    opened(tmp_path / "a")
    assert "the name and the size" not in caplog.text


def test_test_images_without_classes_are_left_out_beside_validation_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tree(tmp_path / "a", "train/cat", "train/dog", "val/cat", "val/dog"), "test/1.png", "test/2.png")
    data = opened(tmp_path / "a")
    assert data.test is None and counts(data) == {"cat": (4, 4), "dog": (4, 4)}
    assert "a: 2 images in test/, in none of the class folders of train/" in caplog.text
    opened(tree(tmp_path / "a", "train2/cat", "train2/dog", "train_more/cat"))
    assert "a: 8 images in train2/, 4 images in train_more/." in caplog.text


def test_test_images_without_classes_are_refused(tmp_path: Path) -> None:
    fill(tree(tmp_path / "a", "train/cat", "train/dog"), "test/1.png", "test/2.png")
    with pytest.raises(UsageError, match=r"test/ with 2 images in no class folder; give --data .*/train"):
        opened(tmp_path / "a")


def test_test_images_in_a_folder_that_is_no_class_are_refused(tmp_path: Path) -> None:
    fill(tree(tmp_path / "a", "train/n01/images", "train/n02/images"), "val/images/1.png", "val/images/2.png")
    with pytest.raises(UsageError, match=r"val/ with 2 images in no class folder; give --data .*/train"):
        opened(tmp_path / "a")


@pytest.mark.parametrize(
    "names",
    [("train", "test"), ("train2017", "val2017"), ("train", "test1"), ("trainA", "testA", "trainB", "testB")],
)
@pytest.mark.parametrize("path", ["{0}/{1}.png", "{0}/{0}/{1}.png"])
def test_training_and_test_images_without_classes_are_no_classes(
    names: tuple[str, ...], path: str, tmp_path: Path
) -> None:
    fill(tmp_path / "a", *(path.format(name, number) for name in names for number in range(5)))
    with pytest.raises(
        UsageError,
        match=rf"{names[0]}/ and {names[1]}/ without class folders; .*--validation-data .* and the classes with",
    ):
        opened(tmp_path / "a")


def test_a_class_called_as_its_part_keeps_the_images_in_folders_of_its_own(tmp_path: Path) -> None:
    data = opened(tree(tmp_path / "a", "train/car", "train/train", "train/train/steam", "test/car", "test/train"))
    assert counts(data) == {"car": (4, 4), "train": (8, 4)}


def test_an_image_beside_the_classes_makes_no_class_of_the_training_folder(tmp_path: Path) -> None:
    fill(tree(tmp_path / "a", "train/cat", "train/dog", "test/cat", "test/dog"), "train/stray.png", start=99)
    data = opened(tmp_path / "a")
    assert counts(data) == {"cat": (4, 4), "dog": (4, 4)} and sum(data.train.left_out.values()) == 1


def test_other_folders_beside_training_and_test_folders_are_refused(tmp_path: Path) -> None:
    tree(tmp_path / "a", "train/cat", "train/dog", "test/cat", "test/dog", "extra/cat")
    with pytest.raises(UsageError, match=r"other folders, such as extra/.*--data .*/train --validation-data .*/test"):
        opened(tmp_path / "a")


def test_names_that_differ_in_their_unicode_form_are_one_class(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "héron") for form in ("NFC", "NFD"))
    tree(tmp_path / "train", composed, "chat")
    tree(tmp_path / "test", decomposed)
    assert counts(opened(tmp_path / "train", tmp_path / "test")) == {"chat": (4, 0), composed: (4, 4)}


def test_files_that_are_left_out_are_told_by_reason_and_a_class_that_vanishes_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fill(tree(tmp_path / "a", "cat", "dog"), "owl/1.jfif", "owl/2.jfif")
    dicom = [f"cat/1.2.840.{number}" for number in range(30)]  # whose names have dots, and no suffix
    for path in ("fox/1.tif", "fox/2.TIF", "cat/x.xyz", "cat/.3.jpg.icloud", "out.manifest", *dicom):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(b"x")
    (folder / "elk").mkdir()
    (folder / "elk" / "1.png").symlink_to("/nowhere/1.png")
    (folder / "dog" / "9.png").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{1:064x}\nsize 99\n")
    (folder / "yak").mkdir()
    fill(folder, "cat/@eaDir/1.png/SYNO.jpg", "__MACOSX/cat/1.png", "$RECYCLE.BIN/x.png", "cat/.hidden.png")
    fill(folder, "#recycle/1.png", "#recycle/2.png", "cat/#recycle/1.png", "@Recycle/1.png")
    manifest = build_manifest(open_store(str(folder)))
    assert manifest.classes == ("cat", "dog", "owl") and manifest.class_counts().tolist() == [4, 4, 2]
    assert "2 .tif files (not read; convert them to PNG or JPEG)" in caplog.text
    assert "1 link that leads nowhere" in caplog.text and "1 pointer of Git LFS" in caplog.text
    assert "1 .xyz file" in caplog.text and "No image is left in 'elk', 'fox', 'yak'." in caplog.text
    assert "1 empty folder" in caplog.text and sum(manifest.left_out.values()) == 46 and "thumbnails" not in caplog.text
    assert ".manifest" not in caplog.text, "a table that --labels reads is not lost"
    assert "30 files without a suffix" in caplog.text and "1 image that iCloud has not downloaded" in caplog.text

    # Downloads that were broken off have suffixes of random letters, which are too many to be named.
    for number in range(40):
        (folder / "cat" / f"7.jpg.a{number}").write_bytes(b"x")
    caplog.clear()
    assert sum(build_manifest(open_store(str(folder))).left_out.values()) == 86
    assert "files of 40 other kinds" in caplog.text and len(caplog.messages[-1]) < 1000


@pytest.mark.parametrize("name", ["images.zip", "images.tar", "images.tar.zst", "images.h5", "1.png", "data.xyz"])
def test_a_file_where_a_folder_is_expected_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(png(1))
    with pytest.raises(UsageError, match=r"a folder or a prefix of images is expected; (unpack|pack|give|write)"):
        build_manifest(open_store(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("flowers/1.0.0/flowers-train.tfrecord-00000-of-00002", ".tfrecord file;.*write the samples as Parquet"),
        ("train.array_record-00000-of-00001", "write the samples as Parquet"),
        ("train-images-idx3-ubyte", "1 -ubyte file.*write the samples as Parquet"),
        ("sick/1.nii.gz", "write the slices of the volumes"),
        ("run/1.MP4", "write pictures of the videos"),
        ("photos.ZIP", "unpack it"),
        ("cifar-10-batches-py/data_batch_1", "1 file without a suffix;.*If these files hold images, write the samples"),
        ("pixels.csv", "1 table or description;.*If these files hold images, write the samples"),
        ("1.tif", r"1 .tif file \(not read; convert it to PNG or JPEG\); [^;]*\.gif\.$"),
    ],
)
def test_other_containers_of_images_are_refused_with_what_to_do(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a" / name).parent.mkdir(parents=True)
    (tmp_path / "a" / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=told):
        opened(tmp_path / "a")


def test_a_class_of_one_image_is_named(tmp_path: Path) -> None:
    fill(tree(tmp_path / "a", "cat", "dog"), "owl/1.png")
    with pytest.raises(UsageError, match=r"owl in .* has only one image"):
        opened(tmp_path / "a")


def test_a_folder_may_have_the_name_of_a_file(tmp_path: Path) -> None:
    assert build_manifest(open_store(str(tree(tmp_path / "data.parquet", "cat", "dog")))).classes == ("cat", "dog")


def test_a_folder_of_test_images_beside_classes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert counts(opened(tree(tmp_path / "a", "cat", "dog", "test"))).keys() == {"cat", "dog", "test"}
    assert "test/ in" in caplog.text and "is taken for a class of this name, beside 2 others" in caplog.text


@pytest.mark.parametrize(
    "names",
    [
        ("fold1", "fold2", "fold10"),
        ("k-fold 1", "k-fold 2"),
        ("HAM_part_1", "HAM_part_2"),
        ("images_001", "images_002"),
    ],
)
@pytest.mark.parametrize("below", [("cat", "dog"), ("train/cat", "train/dog", "val/cat", "val/dog"), ("",)])
def test_numbered_parts_are_no_classes(names: tuple[str, ...], below: tuple[str, ...], tmp_path: Path) -> None:
    tree(tmp_path / "a", *(f"{name}/{each}" for name in names for each in below), f"{names[0]}/owl")
    with pytest.raises(UsageError, match="and no classes; put the class folders of"):
        opened(tmp_path / "a")


@pytest.mark.parametrize("form", ["{0}_{1}", "{1}-{0}"])
def test_folders_that_say_class_and_part_are_refused_with_the_pattern_for_them(form: str, tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", *(form.format(name, part) for name in ("cat", "dog") for part in ("train", "test")))
    with pytest.raises(UsageError, match="say the class and the part of their images; give --label-pattern '") as told:
        opened(folder)
    data = opened(folder, label_pattern=str(told.value).split("'")[1])
    assert counts(data) == {"cat": (4, 4), "dog": (4, 4)}


@pytest.mark.parametrize("form", ["training_{}", "{} test"])
def test_classes_of_one_part_that_their_names_say_are_refused_with_their_pattern(form: str, tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", *map(form.format, ("fake", "real")))
    with pytest.raises(UsageError, match="say the class and the part of their images; give --label-pattern '") as told:
        opened(folder)
    assert counts(opened(folder, label_pattern=str(told.value).split("'")[1])) == {"fake": (3, 1), "real": (3, 1)}


@pytest.mark.parametrize(
    "names",
    [
        ("bounding_box_train", "bounding_box_test", "query", "gallery"),
        ("bounding_box_train", "gallery"),
        ("bounding_box_train", "bounding_box_test", "query", "gt_bbox", "gt_query"),
        ("train", "extra"),
        ("train/cat", "train/dog", "unlabeled"),
        ("trainA", "trainB"),
        ("val", "test"),
    ],
)
def test_folders_that_are_all_parts_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"are parts of a data set, and no classes; give --data .*a/\w*(train|test)A?[.,]"
    ):
        opened(tree(tmp_path / "a", *names))


@pytest.mark.parametrize(
    ("names", "folder"),
    [
        (("train/cat", "train/dog", "predict"), "train"),
        (("seg_train/seg_train/cat", "seg_train/seg_train/dog", "seg_pred/seg_pred"), "seg_train"),
        (("train/cat", "train/dog", "more/cat"), "train"),
        (("birds/owl", "birds/duck", "test"), "birds"),
        (("data_256/a/airfield", "data_256/b/beach", "val_256", "test_256"), "data_256"),
        (("data/cat", "data/dog", "data/owl", "test/cat", "test/dog"), "data"),
    ],
)
def test_a_folder_of_classes_beside_parts_is_no_class(names: tuple[str, ...], folder: str, tmp_path: Path) -> None:
    data = tree(tmp_path / "a", *names)
    with pytest.raises(UsageError, match=rf"probably parts .*; give --data {data}/{folder}, or, if .* --data") as told:
        opened(data)
    pattern = str(told.value).split("'")[1]
    assert folder in counts(opened(data, label_pattern=pattern, validation_fraction=0.25))


@pytest.mark.parametrize(
    "names",
    [
        ("2024-01-03", "2024-02-28"),
        ("2023_12", "2024_01"),
        ("20240103", "20240104"),
        ("100CANON", "101_PANA", "102ND750"),
    ],
)
def test_folders_of_cameras_and_of_days_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are named by a camera or by dates, and are no classes"):
        opened(tree(tmp_path / "a", *names))
    assert len(counts(opened(tree(tmp_path / "b", "2019", "2020", "20241301")))) == 3  # years, and no date


def test_folders_by_the_first_signs_of_hashes_are_no_classes(tmp_path: Path) -> None:
    hashes = [hashlib.md5(str(number).encode()).hexdigest() for number in range(12)]
    with pytest.raises(UsageError, match="have the first signs of their files' names, and are no classes"):
        opened(fill(tmp_path / "a", *(f"{name[:2]}/{name}.png" for name in hashes)))
    with pytest.raises(UsageError, match="have the first signs of their files' names, and are no classes"):
        opened(fill(tmp_path / "b", *(f"{name[0]}/{name[1]}/{name}.png" for name in hashes)))
    numbers = [f"{label}/{label}{number:07d}.png" for label in (7, 8) for number in range(4)]
    assert counts(opened(fill(tmp_path / "c", *numbers))) == {"7": (3, 1), "8": (3, 1)}


@pytest.mark.parametrize("file", ["{}.txt", "{}.png.json", "../annotations/{}.xml"])
def test_annotations_of_each_image_are_said_not_to_be_read(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path / "a", "site1", "site2")
    for image in list((tmp_path / "a").rglob("*.png")):
        annotation = image.parent / file.format(image.stem)
        annotation.parent.mkdir(exist_ok=True)
        annotation.write_text("0 0.5 0.5 0.1 0.1")
    opened(tmp_path / "a")
    assert "files that are called like its images, such as " in caplog.text


@pytest.mark.parametrize("above", ["", "data_256/", "train/"])
def test_letters_that_sort_the_classes_are_no_classes(above: str, tmp_path: Path) -> None:
    places = ("a/airfield", "a/abbey", "b/beach", "c/church/indoor", "c/church/outdoor")
    tree(tmp_path / "a", *(above + place for place in places))
    if above == "train/":
        tree(tmp_path / "a", *(f"val/{place}" for place in places))
    with pytest.raises(UsageError, match="sort folders such as a/abbey by their first letter") as refused:
        opened(tmp_path / "a")
    pattern = str(refused.value).split("'")[1]
    data = opened(tmp_path / "a", label_pattern=pattern)
    assert data.train.classes == ("abbey", "airfield", "beach", "church/indoor", "church/outdoor")


def test_letters_are_classes_if_folders_below_do_not_begin_with_them(tmp_path: Path) -> None:
    assert counts(opened(tree(tmp_path / "a", "A/A_1", "B/B_1"))).keys() == {"A", "B"}
    assert counts(opened(tree(tmp_path / "b", "A/alice", "B/alice", "B/bob"))).keys() == {"A", "B"}


def test_folders_of_which_some_repeat_below_each_other_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = opened(tree(tmp_path / "a", "Art/cat", "Art/dog", "Photo/cat", "Photo/dog", "Sketch/cat"))
    assert data.train.classes == ("Art", "Photo", "Sketch")
    assert "are taken for the classes; 2 of 2 folders below, such as cat, are in several" in caplog.text
    tree(tmp_path / "b", *(f"{year}/{part}/{name}" for year in "12" for part in ("train", "test") for name in "xy"))
    with pytest.raises(UsageError, match=r"The folders 1, 2 of .* all contain x, y"):
        opened(tmp_path / "b")


def test_training_and_test_folders_beside_others_in_each_class_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tree(tmp_path / "a", "cat/train", "cat/test", "dog/train", "dog/test", "dog/more"))
    assert "train/ and test/ in the topmost folders of" in caplog.text and "in more/" in caplog.text


def test_test_classes_that_are_called_otherwise_are_refused(tmp_path: Path) -> None:
    tree(tmp_path / "a", "train/cat", "train/dog", "test/Cat", "test/Dog")
    with pytest.raises(UsageError, match="the classes cat, dog and test/ with others, Cat, Dog; call the same classes"):
        opened(tmp_path / "a")


@pytest.mark.parametrize(
    "names", [("images",), ("images", "masks"), ("JPEGImages", "Annotations", "SegmentationClass")]
)
def test_folders_of_images_and_of_masks_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    tree(tmp_path / "a", *names)
    with pytest.raises(UsageError, match=f"There are no class folders below .*a, only {sorted(names)[0]}/"):
        opened(tmp_path / "a")


def test_class_folders_beside_masks_are_to_be_given_by_themselves(tmp_path: Path) -> None:
    tree(tmp_path / "a", "images/cat", "images/dog", "segmentations/cat")
    with pytest.raises(UsageError, match=r"only images/, segmentations/; give --data .*a/images, if the classes are"):
        opened(tmp_path / "a")


def test_a_copy_of_the_classes_in_a_folder_beside_them_is_no_class(tmp_path: Path) -> None:
    tree(tmp_path / "a", "no", "yes", "brain_tumor_dataset/no", "brain_tumor_dataset/yes")
    with pytest.raises(UsageError, match=r"a contains no, yes and a folder brain_tumor_dataset/ with .*; give --data"):
        opened(tmp_path / "a")
    opened(tree(tmp_path / "b", "cat", "dog", "dog/cat", "wolf"))  # one folder of the same name may be chance


def test_many_classes_take_no_longer_than_their_images() -> None:
    keys = [f"{number:05d}/{number}{below}/1.png" for number in range(20_000) for below in "ab"]
    labels = np.arange(len(keys), dtype=np.int32) // 2
    sizes_bytes, texts = np.ones(len(keys), np.int64), string_array(keys)
    begun_s = time.process_time()
    folders = read_folders(keys, "photos")
    images = Manifest(texts, labels, sizes_bytes, texts, tuple(sorted(set(folders.classes))), "photos")
    train, validation = hold_out(images, 0.5, seed=0)
    assert time.process_time() - begun_s < 8  # it was minutes
    assert set(train.class_counts()) == set(validation.class_counts()) == {1}


@pytest.mark.parametrize("link", ["kitten", "dog/more"])
def test_a_folder_that_a_link_puts_into_two_classes_is_refused(link: str, tmp_path: Path) -> None:
    tree(tmp_path / "a", "cat", "dog")
    (tmp_path / "a" / link).symlink_to(tmp_path / "a" / "cat")
    with pytest.raises(UsageError, match=f"cat/ and {link}/ in .*a are one folder, by a link.* 'cat' and '"):
        opened(tmp_path / "a")
    tree(tmp_path / "b", "train/cat", "train/dog", "elsewhere/dog").rename(tmp_path / "c")
    (tmp_path / "c" / "elsewhere").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "train" / "owl").symlink_to(tmp_path / "elsewhere" / "dog")  # a class may be elsewhere
    assert counts(opened(tmp_path / "c")).keys() == {"cat", "dog", "owl"}


def test_masks_in_each_class_are_no_images_of_it(tmp_path: Path) -> None:
    tree(tmp_path / "a", "covid/images", "covid/masks", "normal/images", "normal/masks")
    with pytest.raises(UsageError, match=r"The class folders covid, normal of .* contain images, masks, which would"):
        opened(tmp_path / "a")
    parts = ("bottle/train", "bottle/test", "bottle/ground_truth", "cable/train", "cable/test")
    with pytest.raises(UsageError, match=r"contain train/ and test/, and also ground_truth, which would become images"):
        opened(tree(tmp_path / "c", *parts))
    assert counts(opened(tree(tmp_path / "b", "covid/images", "normal/images"))) == {"covid": (3, 1), "normal": (3, 1)}


def test_images_of_packages_in_a_project_are_no_class(tmp_path: Path) -> None:
    tree(tmp_path / "a", "cat", "dog", ".venv/lib/x", "venv/lib/python3.12/site-packages/x", "page/node_modules/x/y")
    assert counts(opened(tmp_path / "a")) == {"cat": (3, 1), "dog": (3, 1)}


def test_sentences_name_the_folders_that_all_images_share_and_each_part(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        tree(tmp_path / "a" / "archive" / part, "images", count=2)
    folder = f"{tmp_path}/a/archive"
    with pytest.raises(UsageError) as refused:
        opened(tmp_path / "a")
    assert f"{folder} contains train/ and test/ without class folders" in str(refused.value)
    options = f"--data {folder}/train --validation-data {folder}/valid --test-data {folder}/test"
    assert f"give {options} and the classes with --labels or --label-pattern. Omit the" in str(refused.value)


def test_one_folder_of_images_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"one class only, 'cats', with .*two classes: put each into .* a label file"):
        opened(tree(tmp_path / "a", "data/train/cats", "data/val/cats"))


def test_a_folder_of_training_images_as_test_images_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tree(tmp_path / "a", "cat", "dog")
    opened(data, data)
    assert "images are trained on, too, as --test-data is the folder of --data" in caplog.text
    opened(tree(data, "held/cat"), data / "held")  # held/ is a class of the training images
    assert "4 of 4 test images are trained on, too, as --test-data is within --data" in caplog.text


def test_masks_beside_training_images_are_no_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match="train/ and val/ without class folders"):
        opened(tree(tmp_path / "a", "train/images", "train/masks", "val/images", "val/masks"))
    opened(tree(tmp_path / "b", "train/cat", "train/masks", "val/cat", "val/masks"))
    assert "masks/ in" in caplog.text and "is taken for a class of this name, beside another" in caplog.text


@pytest.mark.parametrize(
    "name", ["masks", "JPEGImages", "annotations", "unlabeled", "no_label", "plots", "Results", "raw", "images_3sec"]
)
def test_a_folder_that_is_hardly_a_class_is_told(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tree(tmp_path / "a", "cat", "dog", name))
    assert f"{name}/ in" in caplog.text and "is taken for a class of this name, beside 2 others" in caplog.text


def test_masks_beside_images_and_classes_that_are_alike_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(
        tree(tmp_path / "a", "Cat", "cat", "dog", "hot dog", "hot_dog", "hound\u200b", "hound"),
        "dog/0_mask.png",
        "dog/1_mask.png",
        "dog/unmasked_mask.png",
    )
    opened(tmp_path / "a")
    assert "look like masks of others are used as images: 2 in" in caplog.text
    assert "such as dog/0_mask.png" in caplog.text
    fill(tree(tmp_path / "b", "kos1", "kos2"), "kos1/0_label.bmp", "kos1/depth/1_depth.png", "kos2/9_label.bmp")
    opened(tmp_path / "b")
    assert "look like masks of others are used as images: 2 in" in caplog.messages[-1]
    assert r"The classes 'Cat', 'cat', 'hot dog', 'hot_dog', 'hound', … of" in caplog.text


def test_images_in_no_class_folder_are_counted_once(tmp_path: Path) -> None:
    fill(tree(tmp_path / "a", "train/cat", "train/dog", "test/cat", "test/dog"), "train.png")
    data = opened(tmp_path / "a")
    assert (sum(data.train.left_out.values()), sum(data.validation.left_out.values())) == (1, 1)


def test_objects_that_stand_for_folders_are_no_files(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(s3_url)
    for number, path in enumerate(("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")):
        store.put(path, png(number))
    for path in ("_SUCCESS", "cat_$folder$"):
        store.put(path, b"")
    markers = [StoredObject(path, 0, "", datetime.now(timezone.utc)) for path in ("cat", "owl", "dog/none")]
    listed = [*store.list(), *markers]  # the server of the tests keeps none
    monkeypatch.setattr(type(store), "list", lambda *_: listed)
    assert build_manifest(store).class_counts().tolist() == [2, 2]
    assert "2 empty folders. No image is left in 'owl'." in caplog.text and "suffix" not in caplog.text


def test_a_folder_that_may_not_be_read_is_named_unless_it_is_a_disks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tree(tmp_path / "a", "cat", "dog", "lost+found"))
    scan = os.scandir

    def scanned(path: str) -> Any:
        if path.endswith(closed):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    closed = "lost+found"
    monkeypatch.setattr(os, "scandir", scanned)
    assert build_manifest(open_store(folder)).classes == ("cat", "dog")
    closed = "dog"
    with pytest.raises(StorageError, match=f"no permission for {folder}/dog;"):
        build_manifest(open_store(folder))


def test_the_case_of_parts_below_the_classes_does_not_matter(tmp_path: Path) -> None:
    folders = "cat/train", "cat/test", "dog/Train", "dog/Test", "owl/TRAIN", "owl/test"
    data = opened(tree(tmp_path / "a", *folders, count=3))
    assert data.train.classes == ("cat", "dog", "owl")
    assert data.train.class_counts().tolist() == data.validation.class_counts().tolist() == [3, 3, 3]
