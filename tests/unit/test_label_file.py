"""Label files: which images they label, which they hold out, and what is wrong with some."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset, open_dataset, write_manifests
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.manifest import Manifest
from raytrain.datasets.pack import pack
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store
from tests.helpers.small_runs import make_images


def rows_of(images: Path, **columns: Any) -> dict[str, list[str]]:
    """A row for each image: its class is its folder, unless ``columns`` say otherwise, by the image's number."""
    keys = sorted(str(file.relative_to(images)) for file in images.rglob("*.png"))
    rows = {"path": keys, "label": [key.partition("/")[0] for key in keys]}
    return {**rows, **{name: [value(number) for number in range(len(keys))] for name, value in columns.items()}}


def write(file: Path, rows: dict[str, Any]) -> Path:
    table = pa.table(rows)
    (pq.write_table if file.suffix == ".parquet" else pyarrow.csv.write_csv)(table, file)
    return file


def opened(images: Path, labels: Path | str | None, tmp_path: Path, **options: Any) -> tuple[Manifest, Manifest]:
    data = opened_parts(images, labels, tmp_path, **options)
    return data.train, data.validation


def opened_parts(images: Path, labels: Path | str | None, tmp_path: Path, **options: Any) -> Dataset:
    mean = (0.5, 0.5, 0.5)
    config = TrainConfig(
        data=str(images), labels=labels and str(labels), batch_size=2, learning_rate=1, mean=mean, std=mean, **options
    )
    return open_dataset(config, open_store(str(tmp_path / "run")))


def by_key(*manifests: Manifest) -> dict[str, str]:
    keys = [key for manifest in manifests for key in manifest.keys.to_pylist()]
    return dict(zip(keys, (each.classes[label] for each in manifests for label in each.labels), strict=True))


def refused(images: Path, rows: dict[str, Any], tmp_path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        opened(images, write(tmp_path / "labels.csv", rows), tmp_path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return make_images(folder)


@pytest.mark.parametrize("name", ["labels.csv", "labels.parquet"])
def test_the_file_and_not_the_folder_says_the_class(name: str, images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, label=lambda number: ("007", "7")[number % 2])
    train, test = opened(images, write(tmp_path / name, rows), tmp_path)
    assert train.classes == test.classes == ("007", "7")
    assert by_key(train, test) == dict(zip(rows["path"], rows["label"], strict=True))
    assert (len(train), len(test)) == (82, 8)


def test_labels_in_a_bucket_of_images_in_a_bucket(images: Path, tmp_path: Path, s3_url: str) -> None:
    from tests.helpers.small_runs import put_images

    put_images(images, open_store(f"{s3_url}/images"))
    rows = rows_of(images)
    rows["path"] = [f"{s3_url}/images/{key}" for key in rows["path"]]  # whole URLs are understood too
    open_store(s3_url).put("labels.csv", write(tmp_path / "labels.csv", rows).read_bytes())
    config = TrainConfig(data=f"{s3_url}/images", labels=f"{s3_url}/labels.csv", batch_size=2, learning_rate=1)
    data = open_dataset(config, open_store(str(tmp_path / "run")))
    assert (len(data.train), len(data.validation), data.train.classes) == (81, 9, ("blue", "green", "red"))


def test_columns_are_found_by_option(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, breed=lambda number: "ab"[number % 2])
    rows["where"] = rows.pop("path")
    labels = write(tmp_path / "labels.csv", rows)
    train, _ = opened(images, labels, tmp_path, key_column="where", label_column=("breed",))
    assert train.classes == ("a", "b")
    with pytest.raises(UsageError, match=r"has none of key, .* among its columns label, breed, where; .*--key-col"):
        opened(images, labels, tmp_path)
    with pytest.raises(UsageError, match=r"no column 'bread' \(did you mean breed\?\) among .*--label-column"):
        opened(images, labels, tmp_path, key_column="where", label_column=("bread",))


def test_a_column_says_the_three_parts(images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(images, split=lambda number: ("train", "Train_Val", "val", "test", "extra")[number % 5])
    data = opened_parts(images, write(tmp_path / "labels.csv", rows), tmp_path)
    split_of = dict(zip(rows["path"], rows["split"], strict=True))
    assert {split_of[key] for key in by_key(data.train)} == {"train", "Train_Val"}
    assert {split_of[key] for key in by_key(data.validation)} == {"val"}
    assert data.test is not None and {split_of[key] for key in by_key(data.test)} == {"test"}
    assert "Rows of" in caplog.text and "with other splits (18 extra) are not used" in caplog.text
    counts = [images.left_out["images that the label file leaves out"] for images in (data.train, data.validation)]
    assert counts == [18, 18], "images of another part are not left out"
    rows["split"] = ["a"] * 90
    assert "has the values 'a'; it must have train, and validation or test" in refused(images, rows, tmp_path)


def test_each_part_may_be_given_in_its_own_way(images: Path, tmp_path: Path) -> None:
    """Of two parts, the held-out one is for validation; with another one, or a fraction, test images are a test."""
    rows = rows_of(images, split=lambda number: ("train", "train", "test")[number % 3])
    labels = write(tmp_path / "labels.csv", rows)
    two = opened_parts(images, labels, tmp_path)
    assert (len(two.train), len(two.validation), two.test) == (60, 30, None)
    three = opened_parts(images, labels, tmp_path, validation_fraction=0.2)
    assert three.test is not None and (len(three.train), len(three.validation), len(three.test)) == (48, 12, 30)
    assert by_key(three.test) == by_key(two.validation)
    place = str(shutil.copytree(images, tmp_path / "other"))
    given = opened_parts(images, labels, tmp_path, validation_data=place, validation_labels=str(labels))
    assert given.test is not None and (given.validation.url, len(given.test)) == (place, 30)
    alone = opened_parts(images, None, tmp_path, test_data=place)
    assert (alone.validation.url, alone.test) == (place, None)
    split = opened_parts(images, None, tmp_path, test_data=place, validation_fraction=0.1)
    assert split.test is not None and (len(split.train), len(split.validation), split.test.url) == (81, 9, place)
    split.write(open_store(str(tmp_path / "run")))
    stored = opened_parts(images, None, tmp_path, test_data=place, validation_fraction=0.1)
    assert stored.test is not None and stored.stored is stored.train and stored.test.digest == split.test.digest


@pytest.mark.parametrize(
    "before", ["C:\\photos\\images\\", "/home/me/images/", "s3://other/images/", "images/", "./images/"]
)
def test_keys_of_another_place_lead_through_a_folder_of_the_same_name(
    before: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images)
    wanted = dict(zip(rows["path"], rows["label"], strict=True))
    rows["path"] = [before + (key.replace("/", "\\") if "\\" in before else key) for key in rows["path"]]
    train, test = opened(images, write(tmp_path / "labels.csv", rows), tmp_path)
    assert by_key(train, test) == wanted
    assert caplog.text.count("names are elsewhere: ") == 1
    rows["path"][1] = rows["path"][0].replace("images", "older/images")  # of two, nobody knows which
    assert "keys of" in refused(images, rows, tmp_path)
    rows["path"] = [key.replace("images", "others") for key in rows["path"]]
    assert "have no image below" in refused(images, rows, tmp_path)


@pytest.mark.parametrize("before", ["bucket/", "bucket/2024/", "s3://bucket/", "s3://bucket/2024/", "/home/me/photos/"])
def test_keys_may_begin_with_a_bucket_or_folders_that_the_images_lack(
    before: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images)
    wanted = dict(zip(rows["path"], rows["label"], strict=True))
    train, test = opened(
        images, write(tmp_path / "labels.csv", rows | {"path": [before + key for key in wanted]}), tmp_path
    )
    assert by_key(train, test) == wanted
    assert f"names are elsewhere: {before.lstrip('/')}" in caplog.text


def test_keys_of_images_elsewhere_are_not_taken_for_others_of_the_same_name(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images)
    train_rows = rows | {"path": ["train/" + key for key in rows["path"]]}  # the images may be those of val/
    assert "have no image below" in refused(images, train_rows, tmp_path)
    folder = next(path for path in images.iterdir() if path.is_dir())
    rows = rows_of(folder, label=lambda number: str(number % 2))
    names = rows["path"]
    for before in ("photos/", "s3://bucket/train/"):  # without a folder, 1.png may be any image
        assert "have no image below" in refused(folder, rows | {"path": [before + name for name in names]}, tmp_path)

    # But the folders of a URL say where the images were, and these may lie in one folder now.
    wanted = dict(zip(names, rows["label"], strict=True))
    for form in ("s3://bucket/a/b/{1}", "https://test.example/{0}/{1}"):
        keys = [form.format(number, name) for number, name in enumerate(names)]
        assert by_key(*opened(folder, write(tmp_path / "labels.csv", rows | {"path": keys}), tmp_path)) == wanted
    assert "have no image below" in refused(images, rows | {"path": keys}, tmp_path)


@pytest.mark.parametrize(
    "form",
    [
        "https://host.example/images/{}?X-Amz-Signature=abc",
        "http://host.example/images/{}",
        "/data/local-files/?d=images/{}",
    ],
)
def test_urls_of_a_web_server_are_decoded_and_have_no_query(form: str, images: Path, tmp_path: Path) -> None:
    (images / "red").rename(images / "dark red")
    rows = rows_of(images)
    wanted = dict(zip(rows["path"], rows["label"], strict=True))
    rows["path"] = [form.format(key.replace(" ", "%20")) for key in wanted]
    assert by_key(*opened(images, write(tmp_path / "labels.csv", rows), tmp_path)) == wanted
    rows["path"] = [key.replace(".png", "a.png") for key in rows["path"]]
    assert "abc" not in refused(images, rows, tmp_path)  # signatures are secrets


def test_keys_of_one_part_are_not_taken_for_images_of_another(images: Path, tmp_path: Path) -> None:
    train, validation = tmp_path / "train" / "images", tmp_path / "val" / "images"
    shutil.copytree(images, train)
    shutil.copytree(images / "red", validation / "red")
    rows = rows_of(train)
    both = {"path": [f"train/images/{key}" for key in rows["path"]], "label": list(rows["label"])}
    keys_of_validation = [f"val/images/red/{number:03d}.png" for number in range(10)]
    both = {"path": [*both["path"], *keys_of_validation], "label": [*rows["label"], *["blue"] * 10]}
    parts = opened(train, write(tmp_path / "labels.csv", both), tmp_path, validation_data=str(validation))
    assert [len(part) for part in parts] == [len(rows["path"]), 10]
    assert {*by_key(parts[1]).values()} == {"blue"}  # and not red, as the images of these names below train/images

    # A key that may be an image of either is refused.
    told = refused(train, rows, tmp_path, validation_data=str(validation))
    assert "for several images each below" in told and "val/images" in told


def test_those_to_test_on_may_have_a_label_file_of_their_own(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images, label=lambda number: "ab"[number % 2])
    apart = [{name: values[start::3] for name, values in rows.items()} for start in (0, 1)]
    labels, tested = (
        write(tmp_path / f"{name}.csv", each) for name, each in zip(("train", "test"), apart, strict=True)
    )
    train, test = opened(images, labels, tmp_path, test_labels=str(tested))
    assert [by_key(each) for each in (train, test)] == [
        dict(zip(each["path"], each["label"], strict=True)) for each in apart
    ]
    assert "are not used: 30." in caplog.text, "those in neither"
    with pytest.raises(UsageError, match=r"both have 30 images, such as '.*'; leave each in one"):
        opened(images, labels, tmp_path, test_labels=str(labels))
    split = write(tmp_path / "split.csv", {**rows, "split": ["train", "test"] * 45})
    for one, other in ((split, tested), (labels, split)):
        with pytest.raises(UsageError, match=r"split.csv says itself which images are held out; give it alone"):
            opened(images, one, tmp_path, test_labels=str(other))
    with pytest.raises(UsageError, match=r"nothing which are trained on; give --labels or --test-data"):
        opened(images, None, tmp_path, test_labels=str(tested))


def test_class_folders_are_tested_on_images_of_a_label_file(images: Path, tmp_path: Path) -> None:
    flat = tmp_path / "val"
    flat.mkdir()
    for number, file in enumerate(sorted(images.rglob("*.png"))[::30]):
        (flat / f"{number}.png").write_bytes(file.read_bytes())
    tested = tmp_path / "val.txt"
    tested.write_text("0.png blue\n1.png green\n2.png red\n")
    options: dict[str, Any] = {"test_data": str(flat), "test_labels": str(tested)}
    train, test = opened(images, None, tmp_path, **options)
    assert (len(train), by_key(test)) == (90, {"0.png": "blue", "1.png": "green", "2.png": "red"})
    write_manifests(open_store(str(tmp_path / "run")), train, test)
    assert opened(images, None, tmp_path, **options)[0].digest == train.digest
    tested.write_text("0.png blue\n1.png green\n2.png blue\n")
    assert list(by_key(opened(images, None, tmp_path, **options)[1]).values()) == ["blue", "green", "blue"]
    tested.write_text("0.png blue\n1.png green\n2.png mauve\n")
    with pytest.raises(UsageError, match="has 1 class that the training images lack: mauve"):
        opened(images, None, tmp_path, **options)


def test_a_split_without_labels_is_named(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, split=lambda number: ("train", "test")[number % 2])
    rows["label"] = [label * (number % 2 == 0) for number, label in enumerate(rows["label"])]
    assert "has a label and the split test in" in refused(images, rows, tmp_path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Split", ("Train", "TRAIN", "Test")),
        ("set", ("train", "train2017", "val2017")),
        ("Usage", ("Training", "PublicTest", "PrivateTest")),
    ],
)
def test_test_images_are_held_out_whatever_the_column_is_called(
    name: str, values: tuple[str, ...], images: Path, tmp_path: Path
) -> None:
    rows = rows_of(images, **{name: lambda number: values[number % 3]})
    train, test = opened(images, write(tmp_path / "labels.csv", rows), tmp_path)
    value_of = dict(zip(rows["path"], rows[name], strict=True))
    assert not {value_of[key] for key in by_key(train)} & {value_of[key] for key in by_key(test)}
    adversarial, _ = opened(images, tmp_path / "labels.csv", tmp_path, label_column=(name,))
    assert set(by_key(adversarial).values()) == set(values)  # tells training from validation images
    rows["fold"] = rows[name]
    rows["set2"] = rows.pop(name)
    assert "columns 'fold', 'set2' of the label file" in refused(images, rows, tmp_path)


def test_tags_of_each_image_say_its_part(images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tags_of = (["train", "seen"], ["train"], ["validation"], ["seen", "test"], ["seen"])  # as FiftyOne writes them
    rows = rows_of(images, tags=lambda number: tags_of[number % 5])
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps([dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]))
    data = opened_parts(images, labels, tmp_path)
    tags_of_key = dict(zip(rows["path"], rows["tags"], strict=True))
    for part, (_, manifest, _) in data.parts.items():
        assert len(manifest) and all(part in tags_of_key[key] for key in manifest.keys.to_pylist())
    assert "The column 'tags' of" in caplog.text and "with other splits (18 none) are not used" in caplog.text

    labels.write_text(labels.read_text().replace('"seen", "test"', '"train", "test"'))
    assert opened_parts(images, labels, tmp_path).test is None
    assert "'tags' of" in caplog.text and "not read as the split: 18 of its lists name several parts" in caplog.text


def test_a_column_of_flags_that_would_hold_out_images_is_said_not_to_be_read(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(
        images, write(tmp_path / "labels.csv", rows_of(images, is_valid=lambda number: str(number % 5 == 0))), tmp_path
    )
    assert "The column 'is_valid' of" in caplog.text and "is not read; a column split" in caplog.text


def test_groups_are_on_one_side_as_a_whole_and_classes_keep_their_shares(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, patient=lambda number: f"p{number % 30 // 2}")  # each has images of all three classes
    labels = write(tmp_path / "labels.csv", rows)
    train, test = opened(images, labels, tmp_path, group_by="patient", validation_fraction=0.2)
    patient_of = dict(zip(rows["path"], rows["patient"], strict=True))
    assert {patient_of[key] for key in by_key(train)}.isdisjoint({patient_of[key] for key in by_key(test)})
    assert Counter(by_key(test).values()) == {"blue": 6, "green": 6, "red": 6}
    again = opened(images, labels, tmp_path, group_by="patient", validation_fraction=0.2)[1]
    other = opened(images, labels, tmp_path, group_by="patient", validation_fraction=0.2, seed=1)[1]
    assert again.digest == test.digest != other.digest


def test_a_given_split_that_divides_groups_is_told_with_numbers(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def split(number: int) -> str:
        return "test" if number % 30 < 5 else "train"

    rows = rows_of(images, patient=lambda number: f"p{number % 30 // 2}", split=split)
    opened(images, write(tmp_path / "labels.csv", rows), tmp_path, group_by="patient")
    assert "1 of 15 values of --group-by patient, such as p2, have both training and held-out images" in caplog.text
    caplog.clear()
    parts = [[row == name for row in rows["split"]] for name in ("train", "test")]
    train, test = ({name: list(compress(rows[name], part)) for name in ("path", "label", "patient")} for part in parts)
    files = [write(tmp_path / name, table) for name, table in (("one.csv", train), ("two.csv", test))]
    opened(images, files[0], tmp_path, group_by="patient", test_labels=str(files[1]))
    assert "1 of 15 values of --group-by patient" in caplog.text
    caplog.clear()
    rows["split"] = ["test" if number % 30 < 4 else "train" for number in range(90)]
    opened(images, write(tmp_path / "labels.csv", rows), tmp_path, group_by="patient")
    assert "group-by" not in caplog.text
    with pytest.raises(UsageError, match="--group-by is for the label file of the training images; give that with"):
        TrainConfig(group_by="patient", test_labels="a.csv", data="a", test_data="b", batch_size=1, learning_rate=1)


def test_groups_of_held_out_images_are_those_of_their_own_label_file(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(images, tmp_path / "test")
    for file in (tmp_path / "test").rglob("*.png"):
        file.rename(file.with_name(f"other-{file.name}"))
    train = write(tmp_path / "train.csv", rows_of(images, patient=lambda number: f"p{number}"))
    test = write(tmp_path / "test.csv", rows_of(tmp_path / "test", patient=lambda number: f"q{number}"))
    held_out = {"test_data": str(tmp_path / "test"), "test_labels": str(test)}
    opened(images, train, tmp_path, group_by="patient", **held_out)
    assert "--group-by" not in caplog.text


def test_groups_that_cannot_be_held_out_are_refused(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, patient=lambda number: "ab"[number // 45])
    assert "None of 2 groups is small enough for --validation-fraction 0.1: the smallest has 45 of 90" in refused(
        images, rows, tmp_path, group_by="patient"
    )
    rows["patient"][3:5] = ["", "nan"]
    assert "2 of 90 rows of" in refused(images, rows, tmp_path, group_by="patient")


def test_test_images_of_another_folder_take_their_labels_from_the_same_file(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images)
    (tmp_path / "test").mkdir()
    for name in ("blue", "green"):
        (images / name / "000.png").rename(tmp_path / "test" / f"{name}.png")
    rows["path"][0], rows["path"][30] = "blue.png", "green.png"
    labels = write(tmp_path / "labels.csv", rows)
    train, test = opened(images, labels, tmp_path, test_data=str(tmp_path / "test"))
    assert (len(train), by_key(test)) == (88, {"blue.png": "blue", "green.png": "green"})


def test_packed_images_take_other_labels(images: Path, tmp_path: Path) -> None:
    pack(str(images), str(tmp_path / "packed"))
    rows = rows_of(images, label=lambda number: "ab"[number % 2])
    train, test = opened(tmp_path / "packed", write(tmp_path / "labels.csv", rows), tmp_path)
    assert by_key(train, test) == dict(zip(rows["path"], rows["label"], strict=True)) and train.packing is not None


def test_few_unknown_keys_and_images_without_labels_are_told_in_numbers(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {name: values[:-5] for name, values in rows_of(images).items()}
    rows["path"][0] = "gone.png"
    with caplog.at_level(logging.WARNING, "raytrain"):
        train, test = opened(images, write(tmp_path / "labels.csv", rows), tmp_path, max_bad_fraction=0.02)
    assert len(train) + len(test) == 84
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "are not used: 6." in told and "1 of 85 keys of" in told and "'gone.png'; they are not used." in told


def test_many_unknown_keys_are_refused_with_the_first_three(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images)
    rows["path"][:4] = [f"gone/{number}.png" for number in range(4)]
    sentence = refused(images, rows, tmp_path)
    assert "4 of 90 keys of" in sentence
    assert "have no image below" in sentence and ": 'gone/0.png', 'gone/1.png', 'gone/2.png', …;" in sentence
    assert "such as 'blue/000.png'" in sentence


def test_keys_may_lack_the_suffixes_of_files(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images)
    expected = dict(zip(rows["path"], rows["label"], strict=True))
    rows["path"] = [key.removesuffix(".png") for key in rows["path"]]
    assert by_key(*opened(images, write(tmp_path / "labels.csv", rows), tmp_path)) == expected
    for name in ("000", "001"):
        (images / "red" / f"{name}.jpg").write_bytes(b"a mask")
    assert (
        "2 keys for several images" in (sentence := refused(images, rows, tmp_path))
        and "differ in folder, suffix or Unicode form only" in sentence
    )


@pytest.mark.parametrize("suffix", ["", ".png"])
def test_keys_may_lack_the_folders_of_files(suffix: str, images: Path, tmp_path: Path) -> None:
    for folder in ("red", "blue", "green"):
        for file in (images / folder).iterdir():
            file.rename(file.with_name(f"{folder}{file.name}"))
    rows = rows_of(images)
    expected = dict(zip(rows["path"], rows["label"], strict=True))
    rows["path"] = [key.rpartition("/")[2].removesuffix(".png") + suffix for key in rows["path"]]
    assert by_key(*opened(images, write(tmp_path / "labels.csv", rows), tmp_path)) == expected
    (images / "blue" / "red000.png").write_bytes(b"another")
    assert (
        "1 key for several images" in (sentence := refused(images, rows, tmp_path))
        and "differ in folder, suffix or" in sentence
    )


def test_keys_that_disagree_are_refused_and_keys_that_agree_count_once(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images)
    twice = {name: values + values[:1] for name, values in rows.items()}
    train, test = opened(images, write(tmp_path / "labels.csv", twice), tmp_path)
    assert len(train) + len(test) == 90
    twice["label"][-1] = "red"
    assert "contradicts itself for 1 key, such as 'blue/000.png', which is 'blue' and 'red'" in refused(
        images, twice, tmp_path
    )


def test_what_is_no_table_is_refused(images: Path, tmp_path: Path) -> None:
    for name, content in (("labels.csv", b"a,b\n1,2,3\n"), ("labels.csv", b""), ("labels.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=r"cannot be read as a table \(.*\); correct the file"):
            opened(images, tmp_path / name, tmp_path)
    with pytest.raises(StorageError, match=r"There is no file .*missing.csv; check the path of --labels"):
        opened(images, tmp_path / "missing.csv", tmp_path)
    (tmp_path / "labels.xlsx").write_bytes(b"")
    with pytest.raises(UsageError, match=r"must end in .csv, .tsv, .txt, .json, .jsonl, .parquet"):
        opened(images, tmp_path / "labels.xlsx", tmp_path)
    with pytest.raises(UsageError, match="--group-by is for the label file; give that with --labels"):
        TrainConfig(group_by="patient", batch_size=1, learning_rate=1)


# Tables as spreadsheets and other programs write them.


def text(tmp_path: Path, content: str | bytes, name: str = "labels.csv") -> Path:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / name


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "form",
    ["./{}", ".//{}", "red/x/../../{}", "/{}", " {} ", "{images}/{}", "file://{images}/{}", "{link}/{}"],
)
def test_keys_in_any_form_are_those_of_the_images(form: str, images: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(images)
    keys = sorted(str(file.relative_to(images)) for file in images.rglob("*.png"))
    rows = [
        f"{form.format(key, images=images, link=tmp_path / 'link')},{'ab'[number % 2]}"
        for number, key in enumerate(keys)
    ]
    data = tmp_path / "link" if "link" in form else images
    found = by_key(*opened(data, text(tmp_path, "path,label\n" + "\n".join(rows) + "\n"), tmp_path))
    assert found == {key: "ab"[number % 2] for number, key in enumerate(keys)}


@pytest.mark.parametrize("before", ["", "C:\\data\\images\\", "data/images\\", "./"])
def test_keys_may_have_the_slashes_of_windows(before: str, images: Path, tmp_path: Path) -> None:
    """``os.path.join("data/images", "red", "000.png")`` gives both kinds there."""
    rows = rows_of(images)
    expected = dict(zip(rows["path"], rows["label"], strict=True))
    rows["path"] = [before + key.replace("/", "\\") for key in rows["path"]]
    assert by_key(*opened(images, write(tmp_path / "labels.csv", rows), tmp_path)) == expected


@pytest.mark.parametrize("folder", ["", "more/"])
def test_names_with_the_slashes_of_windows_are_found(folder: str, images: Path, tmp_path: Path) -> None:
    """Some programs unpack an archive from Windows to such names, and a label file may have either slash."""
    (images / folder).mkdir(exist_ok=True)
    for file in sorted(images.rglob("*.png")):
        file.rename(images / f"{folder}{file.parent.name}\\{file.name}")
    images.joinpath("red").rmdir()
    rows = rows_of(images, label=lambda number: "ab"[number % 2])
    expected = dict(zip(rows["path"], rows["label"], strict=True))
    for slash in ("\\", "/"):
        rows["path"] = [key.replace("\\", slash) for key in rows["path"]]
        assert by_key(*opened(images, write(tmp_path / "labels.csv", rows), tmp_path)) == expected
    pattern = r"(?P<label>red|blue|green)\\"
    labels = set(by_key(*opened(images, None, tmp_path, label_pattern=pattern)).values())
    assert labels == {"red", "blue", "green"}


@pytest.mark.parametrize(
    "content",
    [
        ",path,label\n{rows}",  # pandas's index
        "path,label,size,size\n{rows}",  # names repeat
        "\ufeffpath,label\r\n{rows}",
        "path, label\n{rows}",
        "path;label\n{rows}",
        "path\tlabel\n{rows}",
        "path|label\n{rows}",
        "path,label\r{rows}",  # an old Mac's lines
        "path\tlabel\tsize (w, h)\n{rows}",
        'path;label;"size, px"\n{rows}',
        "Path,LABEL\n{rows}",
        "\ufeffsep=;\r\npath;label\r\n{rows}",  # Excel's
    ],
)
def test_tables_of_other_programs_are_read(content: str, images: Path, tmp_path: Path) -> None:
    keys = sorted(str(file.relative_to(images)) for file in images.rglob("*.png"))
    comma = next((each for each in ";\t|" if each in content), ",")
    index, more = content.startswith(","), f"{comma}5" * content.count("size")
    rows = "".join(f"{n}{comma}" * index + f"{key}{comma} {'ab'[n % 2]}{more}\n" for n, key in enumerate(keys))
    rows = rows.replace("\n", "\r" if "\r{" in content else "\n")
    encoded = content.replace("{rows}", rows + index * f"{len(keys)},{keys[0]},a\n").encode()
    assert by_key(*opened(images, text(tmp_path, encoded), tmp_path)) == {
        key: "ab"[number % 2] for number, key in enumerate(keys)
    }


def test_texts_that_stand_for_no_label_are_none_and_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = sorted(str(file.relative_to(images)) for file in images.rglob("*.png"))
    labels = ["NaN", "", "-1", "N/A", "#REF!", *(f"{number % 2}.0" for number in range(len(keys) - 5))]
    content = "path,label\n" + "".join(f"{key},{label}\n" for key, label in zip(keys, labels, strict=True))
    assert sorted(set(by_key(*opened(images, text(tmp_path, content), tmp_path)).values())) == ["0", "1"]
    assert "labels.csv: 5 without a label (1 NaN, 1 empty, 1 -1, 1 N/A, 1 #REF!)." in caplog.text


def test_json_lines_are_read(images: Path, tmp_path: Path) -> None:
    keys = sorted(str(file.relative_to(images)) for file in images.rglob("*.png"))
    lines = [json.dumps({"file_name": key, "label": "ab"[number % 2]}) for number, key in enumerate(keys)]
    found = by_key(*opened(images, text(tmp_path, "\n".join(lines), "metadata.jsonl"), tmp_path))
    assert found == {key: "ab"[number % 2] for number, key in enumerate(keys)}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"path": ["a"], "label": [[1, 2]]}, r"1 of 1 rows of .* have a list of several labels; .*--label-separator"),
        ({"path": [["a"]], "label": ["a"]}, "holds lists"),
        ({"path": ["a"], "label": [{"id": 1}]}, "none of label, .* among its columns path, label.id"),
        ({"path": [{"bytes": b"x"}], "label": ["a"]}, "none of key, .* among its columns path.bytes, label"),
        ({"path": [], "label": []}, "has no row"),
    ],
)
def test_columns_that_hold_no_text_are_refused(
    rows: dict[str, Any], expected: str, images: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=expected):
        opened(images, write(tmp_path / "labels.parquet", rows), tmp_path)


def test_a_column_that_is_there_twice_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 2 columns 'label'; rename one"):
        opened(images, text(tmp_path, "path,label,label\nred/000.png,a,b\n"), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "path,label\nred/000.png,héron\n".encode("cp1252"),
        "path,label\nred/000.png,a\n".encode("utf-16")[:-1],
        "path,label\nred/000.png,a\n".encode("utf-16-be"),  # without a mark
        b"PK\3\4\0\0path,label",  # a spreadsheet
    ],
)
@pytest.mark.parametrize("name", ["labels.csv", "labels.jsonl"])
def test_a_file_in_another_encoding_is_refused(name: str, content: bytes, images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not in UTF-8"):
        opened(images, text(tmp_path, content, name), tmp_path)


@pytest.mark.parametrize("name", ["labels.csv", "labels.jsonl"])
def test_rows_may_be_long(name: str, images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, label=lambda number: "ab"[number % 2], mask=lambda number: "1 2 " * 600_000 * (number == 5))
    as_json = "\n".join(json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True))
    labels = write(tmp_path / name, rows) if name.endswith("csv") else text(tmp_path, as_json, name)
    assert len(by_key(*opened(images, labels, tmp_path))) == 90


@pytest.mark.parametrize("content", ["null\n", "1\n", "[]\n", ""])
def test_json_lines_without_objects_are_refused(content: str, images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read as a table \(.+\); correct the file"):
        opened(images, text(tmp_path, content, "labels.jsonl"), tmp_path)


@pytest.mark.parametrize("type", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_of_any_type_hold_out_images(type: Any, images: Path, tmp_path: Path) -> None:
    rows: dict[str, Any] = rows_of(images, fold=lambda number: ("train", "test")[number % 2])
    rows = {name: pa.array(values).cast(type) for name, values in rows.items()}
    train, test = opened(images, write(tmp_path / "labels.parquet", rows), tmp_path)
    assert (len(train), len(test)) == (45, 45)


@pytest.mark.parametrize("joined", ["a b", "a/b", "[a, c]"])
def test_a_label_that_looks_like_several_is_told(
    joined: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images, label=lambda number: ("a", "b", joined)[number % 3])
    opened(images, write(tmp_path / "labels.csv", rows), tmp_path)
    assert f"The label {joined!r} of" in caplog.text


def test_classes_behind_another_separator_and_classes_that_are_alike_are_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images, label=lambda number: ("a", "b", "a|b", "B")[number % 4])
    opened(images, write(tmp_path / "labels.csv", rows), tmp_path, label_separator=",")
    assert "The label 'a|b' of" in caplog.text and "The classes 'B', 'b' of" in caplog.text


def test_lists_of_labels_as_programs_write_them_are_several_classes(images: Path, tmp_path: Path) -> None:
    texts = "['a', 'hot dog']", "[]", "NaN", '{"choices": ["a", "hot dog"]}', "a"  # the last two are Label Studio's
    rows = rows_of(images, label=lambda number: texts[number % 5])
    train, _ = opened(images, write(tmp_path / "labels.csv", rows), tmp_path, label_separator=",")
    assert train.classes == ("a", "hot dog")


def test_one_class_is_refused_with_the_number_of_its_images(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, label=lambda number: "ab"[number > 9], split=lambda number: ("train", "val")[number > 9])
    assert "has one class only, 'a', with 10 images" in refused(images, rows, tmp_path)


@pytest.mark.parametrize(
    "texts",
    [
        ("['a']", "['b', 'b']"),
        ('["a"]', '["b"]'),
        ('{"animal": "a"}', '{"animal":["b"]}'),
        ('[{"name": "a"}]', '[{"name": "b"}, {"name": "b"}]'),
    ],
)
def test_a_list_of_one_label_is_that_class(texts: tuple[str, str], images: Path, tmp_path: Path) -> None:
    rows = rows_of(images, label=lambda number: texts[number % 2])
    assert opened(images, write(tmp_path / "labels.csv", rows), tmp_path)[0].classes == ("a", "b")
    rows["label"][0] = '{"animal": ["a", "b"]}'
    with pytest.raises(UsageError, match=r"1 of 90 rows of .* have a list of several labels"):
        opened(images, write(tmp_path / "labels.csv", rows), tmp_path)


def test_a_class_that_probably_stands_for_no_label_is_named(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images, label=lambda number: ("NA", "NL", "?")[number % 3])
    assert opened(images, write(tmp_path / "labels.csv", rows), tmp_path)[0].classes == ("?", "NA", "NL")
    assert "'?', 'NA' of" in caplog.text and "leave the label of images without a class empty" in caplog.text


def test_keys_that_are_one_image_and_disagree_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"contradicts itself for 1 key, such as 'red/000.png'"):
        opened(images, text(tmp_path, "path,label\nred/000.png,a\n./red/000.png,b\n"), tmp_path)


# The label file beside the images.


def metadata(images: Path, rows: dict[str, Any], name: str = "metadata.csv") -> Path:
    rows = {"file_name": rows.pop("path"), **rows}
    write(images / name, rows)
    return images


def test_the_label_file_beside_the_images_says_the_classes(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(
        images, label=lambda number: "ab"[number % 2], split=lambda number: ("train", "test")[number % 3 < 1]
    )
    expected = dict(zip(rows["path"], rows["label"], strict=True))
    train, test = opened(metadata(images, rows), None, tmp_path)
    assert by_key(train, test) == expected and (len(train), len(test)) == (60, 30)
    assert "The classes are those in" in caplog.text and "metadata.csv" in caplog.text
    pack(str(images), str(tmp_path / "packed"), split="train")
    assert by_key(build_manifest(open_store(str(tmp_path / "packed")))) == by_key(train)
    (images / "metadata.csv").unlink()
    assert by_key(*opened(images, None, tmp_path, name="other")) != expected


def test_training_and_test_images_may_each_have_their_label_file(images: Path, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    for number, file in enumerate(sorted(images.rglob("*.png"))[:4]):
        file.rename(tmp_path / "test" / f"{number}.png")
        row = {"file_name": f"{number}.png", "label": "red", "split": "test"}
        with (tmp_path / "test" / "metadata.jsonl").open("a") as lines:
            lines.write(f"{json.dumps(row)}\n")
    train, test = opened(images, None, tmp_path, test_data=str(tmp_path / "test"))
    assert len(train) == 86 and by_key(test) == {f"{number}.png": "red" for number in range(4)}


def test_a_table_of_something_else_beside_the_images_is_said_not_to_be_read(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images, caption=lambda number: f"image {number}")
    del rows["label"]
    train, _ = opened(metadata(images, rows), None, tmp_path)
    assert train.classes == ("blue", "green", "red")
    assert "metadata.csv has no column of labels among file_name, caption, and is not read" in caplog.text


def test_options_of_a_label_file_are_refused_if_there_is_none(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are for a label file, and none is beside the images"):
        pack(str(images), str(tmp_path / "packed"), split="train")


@pytest.mark.parametrize("folder", ["", "data/"])
def test_folders_of_training_and_test_images_hold_out_the_test_images(
    folder: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, file in enumerate(sorted(images.rglob("*.png"))):
        part = images / f"{folder}{('Train', 'val')[number % 5 < 1]}"
        part.mkdir(parents=True, exist_ok=True)
        file.rename(part / f"{number}.png")
    rows = rows_of(images, label=lambda number: "ab"[number % 2])
    train, test = opened(images, write(tmp_path / "labels.csv", rows), tmp_path)
    assert {key.removeprefix(folder).split("/")[0] for key in by_key(train)} == {"Train"} and len(test) == 18
    assert "The folders Train, val in" in caplog.text and "do not say" not in caplog.text
    rows["path"] = [Path(key).name for key in rows["path"]]
    opened(images, write(tmp_path / "labels.csv", rows), tmp_path)
    assert "The folders Train, val below" in caplog.text and "do not say the split" in caplog.text
    caplog.clear()
    other = next((images / folder / "Train").iterdir())
    (images / folder / "more").mkdir()
    other.rename(images / folder / "more" / other.name)
    opened(images, write(tmp_path / "labels.csv", rows_of(images, label=lambda number: "ab"[number % 2])), tmp_path)
    assert "do not say the split; a column split in" in caplog.text


@pytest.mark.parametrize("given", ["folders", "column"])
def test_a_fraction_that_is_not_used_is_told(
    given: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if given == "folders":
        labels = None
        for part in ("train", "val"):
            shutil.copytree(images, tmp_path / "both" / part)
        images = tmp_path / "both"
    else:
        labels = write(tmp_path / "a.csv", rows_of(images, split=lambda number: ("train", "val")[number % 3 == 0]))
    opened(images, labels, tmp_path)
    assert "--validation-fraction" not in caplog.text
    opened(images, labels, tmp_path, validation_fraction=0.3)
    assert "--validation-fraction 0.3 is not used: the validation images are given." in caplog.text


def test_a_file_where_the_images_should_be_is_refused_as_such(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder or a prefix of images is expected; give the folder"):
        opened(text(tmp_path, "a.png b\n", "val.txt"), None, tmp_path)


def test_rows_that_name_no_image_are_counted(images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(images)
    rows["path"][3:5] = ["", " "]
    opened(images, write(tmp_path / "labels.csv", rows), tmp_path)
    assert "Rows of " in caplog.text and "that name no image are not used: 2" in caplog.text
    rows["path"] = [""] * len(rows["path"])
    assert "names an image; its keys are empty" in refused(images, rows, tmp_path)


def test_rows_that_say_that_an_image_does_not_have_the_class_are_not_used(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images)
    present, absent = (
        dict(zip(rows["path"], rows["label"], strict=True)),
        {"path": rows["path"][:3], "label": ["owl"] * 3},
    )
    both = {name: rows[name] + absent[name] for name in rows}
    for one, zero in (("1", "0"), ("1.0", "0.0")):
        confidences = {"Confidence": [one] * len(present) + [zero] * 3}
        assert by_key(*opened(images, write(tmp_path / "labels.csv", both | confidences), tmp_path)) == present
        assert f"whose Confidence is {zero}, so that the label does not hold, are not used: 3." in caplog.text
    answers = {"answer": ["accept"] * len(present) + ["reject", "reject", "ignore"]}
    assert by_key(*opened(images, write(tmp_path / "labels.csv", both | answers), tmp_path)) == present
    assert "whose answer is reject or ignore, so that the label does not hold, are not used: 3." in caplog.text
    confidences = ["0.7" if number % 2 else "0" for number in range(len(present))]  # of a model, which may be 0, too
    assert (
        by_key(*opened(images, write(tmp_path / "labels.csv", rows | {"confidence": confidences}), tmp_path)) == present
    )


def test_rows_of_one_image_are_its_classes_if_it_may_have_several(images: Path, tmp_path: Path) -> None:
    rows = rows_of(images)
    num_images = len(rows["path"])
    new = ["new" if number % 2 else "" for number in range(num_images)]
    twice = {"path": rows["path"] * 2, "label": rows["label"] + new}
    assert "or give --label-separator if an image may have several" in refused(images, twice, tmp_path)
    data = opened_parts(images, write(tmp_path / "labels.csv", twice), tmp_path, label_separator="|")
    for part in (data.train, data.validation):
        names = [part.class_names(label) for label in part.labels]
        for key, classes in zip(part.keys.to_pylist(), names, strict=True):
            has_new = rows["path"].index(key) % 2
            assert set(classes) == {key.partition("/")[0], *(["new"] if has_new else [])}
    splits = {"split": ["train"] * num_images + ["val"] * num_images}
    assert f"contradicts itself for {num_images} keys" in refused(images, twice | splits, tmp_path, label_separator="|")


@pytest.mark.parametrize("suffix", [".PNG", ".tif", ".jpg"])
def test_images_may_have_other_suffixes_than_their_keys(
    suffix: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(images)
    wanted = dict(zip(rows["path"], rows["label"], strict=True))
    rows["path"] = [key.replace(".png", suffix) for key in wanted]
    assert by_key(*opened(images, write(tmp_path / "labels.csv", rows), tmp_path)) == wanted
    assert f"names have other suffixes: {rows['path'][0]} is taken for {next(iter(wanted))} below" in caplog.text
    rows["path"][0], rows["path"][1] = "a.jpg", "a.png"  # of two, nobody knows which
    assert "have no image below" in refused(images, rows, tmp_path)
