"""Labels that people write in several ways: one class for one name, and a line or a sentence about a doubtful one."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.label_columns import LabelColumns
from raytrain.data.labels.label_file import read_label_file
from raytrain.data.labels.manifest import list_images
from raytrain.datasets.pack import pack
from raytrain.datasets.upload import upload
from raytrain.errors import UsageError
from raytrain.storage.open import open_store

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
NUM_IMAGES = 30


def png(number: int) -> bytes:
    """A small image that no other number has."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 7)).save(content, "PNG")
    return content.getvalue()


def put(file: Path, content: bytes | str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def tree(folder: Path, *classes: str, count: int = 4) -> Path:
    for number, path in enumerate(f"{name}/{index}.png" for name in classes for index in range(count)):
        put(folder / path, png(number))
    return folder


def opened(data: Path, tmp_path: Path, **options: Any) -> Dataset:
    mean = (0.5, 0.5, 0.5)
    config = TrainConfig(data=str(data), batch_size=2, learning_rate=1, mean=mean, std=mean, **options)
    return open_dataset(config, open_store(str(tmp_path / "run")))


def counts(data: Dataset) -> dict[str, tuple[int, int]]:
    training, test = data.train.class_counts().tolist(), data.validation.class_counts().tolist()
    return dict(zip(data.train.classes, zip(training, test, strict=True), strict=True))


def packed(source: Path | str, folder: Path, **options: Any) -> Counter[str]:
    """How many images of each class are in the shards that are packed."""
    pack(str(source), str(folder), console=Console(file=io.StringIO()), **options)
    manifest = build_manifest(open_store(str(folder)))
    return Counter(dict(zip(manifest.classes, manifest.class_counts().tolist(), strict=True)))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(NUM_IMAGES):
        put(tmp_path / "images" / f"{number:03d}.png", png(number))
    return tmp_path / "images"


def columns_of(**columns: Callable[[int], Any]) -> dict[str, list[Any]]:
    keys = [f"{number:03d}.png" for number in range(NUM_IMAGES)]
    return {"path": keys, **{name: list(map(value, range(NUM_IMAGES))) for name, value in columns.items()}}


def write(file: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a label file in the format that its suffix says, with booleans as pandas writes them."""
    if file.suffix == ".parquet":
        pq.write_table(pa.table(columns), file)
    elif file.suffix == ".json":
        file.write_text(
            json.dumps([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        )
    else:
        rows = [list(columns), *zip(*columns.values(), strict=True)]
        file.write_text("".join(",".join("" if text is None else str(text) for text in row) + "\n" for row in rows))
    return file


def cat_or_dog(number: int) -> str:
    return "dog" if number % 2 else "cat"


# Columns that say the split.


def part_of(parts: Sequence[str | None]) -> Callable[[int], str | None]:
    """20 images are of the first part, 6 of the second one, and 4 of the third one."""
    return lambda number: parts[(number >= 20) + (number >= 26)]


@pytest.mark.parametrize("name", ["labels.csv", "labels.json", "labels.parquet"])
@pytest.mark.parametrize("column", ["subset", "Phase", "where it was"])
@pytest.mark.parametrize(
    "parts", [("train", "test", "extra"), ("TRAIN", "VALIDATION", "UNASSIGNED"), ("Train", "val", None)]
)
def test_rows_of_a_third_part_are_not_used_whatever_the_column_is_called(
    name: str,
    column: str,
    parts: tuple[str | None, ...],
    images: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = write(tmp_path / name, columns_of(label=cat_or_dog, **{column: part_of(parts)}))
    assert counts(opened(images, tmp_path, labels=str(labels))) == {"cat": (10, 3), "dog": (10, 3)}
    assert f"The column {column!r} of" in caplog.text and "says the split into training and" in caplog.text
    assert f"with other splits (4 {(parts[2] or 'none').lower()}) are not used" in caplog.text


def test_packing_asks_which_of_three_parts(images: Path, tmp_path: Path) -> None:
    labels = write(tmp_path / "labels.csv", columns_of(label=cat_or_dog, subset=part_of(("train", "test", "extra"))))
    with pytest.raises(UsageError, match=r"has the splits extra, test, train, .* pack each with --split"):
        packed(images, tmp_path / "packed", labels=labels)
    taken = packed(images, tmp_path / "packed", labels=labels, split="train")
    assert taken == {"cat": 10, "dog": 10}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("partition", lambda number: "012"[number % 3]),
        ("fold", lambda number: "012"[number % 3]),
        ("remark", lambda number: ["train", "test", *"abcdef"][number % 8]),
    ],
)
def test_a_column_that_may_say_what_is_tested_on_is_said_not_to_be_read(
    column: str, value: Callable[[int], str], images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = write(tmp_path / "labels.csv", columns_of(label=cat_or_dog, **{column: value}))
    assert sum(map(sum, counts(opened(images, tmp_path, labels=str(labels))).values())) == NUM_IMAGES
    assert f"The column {column!r} of" in caplog.text and "is not read; a column split" in caplog.text


# Labels that look like several.


@pytest.mark.parametrize("separator", ["|", ";", " ; "])
def test_labels_whose_parts_recur_are_told_with_their_separator(
    separator: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def label(number: int) -> str:
        return separator.join((("rose", "tulip")[number % 2], ("bright", "dark")[number // 2 % 2]))

    labels = write(tmp_path / "labels.parquet", columns_of(label=label))
    assert len(opened(images, tmp_path, labels=str(labels)).train.classes) == 4
    sentence = f"4 of 4 classes of {labels} contain '{separator.strip()}', such as 'rose{separator}bright'"
    assert caplog.text.count(sentence) == 1 and f"give --label-separator '{separator.strip()}'." in caplog.text
    caplog.clear()
    options: dict[str, Any] = {"label_separator": separator.strip()}
    assert opened(images, tmp_path, labels=str(labels), **options).train.classes == ("bright", "dark", "rose", "tulip")
    packed(images, tmp_path / "packed", labels=labels, label_separator=separator.strip())
    assert "each is a class of its own" not in caplog.text


def test_a_label_of_several_beside_one_of_its_parts_is_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = write(tmp_path / "labels.parquet", columns_of(label=lambda number: ("cat;dog", "cat")[number % 2]))
    opened(images, tmp_path, labels=str(labels))
    assert f"1 of 2 classes of {labels} contain ';', such as 'cat;dog'" in caplog.text


def test_names_that_contain_commas_are_names(images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("tench, Tinca tinca", "goldfish, Carassius auratus", "shark")
    labels = write(tmp_path / "labels.json", columns_of(label=lambda number: names[number % 3]))
    opened(images, tmp_path, labels=str(labels))
    assert "--label-separator" not in caplog.text


# One text for one value.


def test_booleans_are_the_same_classes_in_all_formats(tmp_path: Path) -> None:
    columns = columns_of(label=lambda number: number % 2 == 0, patient=lambda number: number % 3 == 0)
    tables = [
        read_label_file(str(write(tmp_path / name, columns)), LabelColumns(group="patient"))
        for name in ("a.csv", "a.parquet", "a.json")
    ]
    columns["label"] = [str(label).upper() for label in columns["label"]]
    tables.append(read_label_file(str(write(tmp_path / "b.csv", columns)), LabelColumns(group="patient")))
    assert set(tables[0].labels) == {"false", "true"} and len({table.digest for table in tables}) == 1


def test_booleans_of_folders_and_archives_are_those_of_label_files(images: Path, tmp_path: Path) -> None:
    folder = tree(tmp_path / "train", "True", "False")
    tested = str(write(tmp_path / "test.csv", columns_of(label=lambda number: number % 2 == 0)))
    assert counts(opened(folder, tmp_path, test_data=str(images), test_labels=tested)) == {
        "false": (4, 15),
        "true": (4, 15),
    }
    parquet(tmp_path / "a" / "0.parquet", [True, False], 0)
    parquet(tmp_path / "a" / "1.parquet", ["True", "False"], 50)
    assert packed(tmp_path / "a", tmp_path / "packed") == {"false": 2, "true": 2}


def test_names_beside_true_and_false_stay_as_they_are(tmp_path: Path) -> None:
    columns = columns_of(label=lambda number: ("True", "False", "Unknown")[number % 3])
    assert set(read_label_file(str(write(tmp_path / "a.csv", columns)), LabelColumns()).labels) == {
        *("True", "False", "Unknown")
    }


@pytest.mark.parametrize("name", ["labels.csv", "labels.json", "labels.parquet"])
def test_both_unicode_forms_of_a_name_are_one_class_in_a_label_file(name: str, images: Path, tmp_path: Path) -> None:
    labels = write(tmp_path / name, columns_of(label=lambda number: (COMPOSED, DECOMPOSED, "thé")[number % 3]))
    assert opened(images, tmp_path, labels=str(labels)).train.classes == (COMPOSED, "thé")
    joined = columns_of(label=lambda number: ("thé|" + (COMPOSED, DECOMPOSED)[number % 2], "thé")[number % 3 == 0])
    write(labels, joined)
    assert opened(images, tmp_path, labels=str(labels), label_separator="|").train.classes == (COMPOSED, "thé")
    flags = columns_of(**{DECOMPOSED: lambda number: number % 2, "thé": lambda number: 1})
    write(labels, flags)
    data = opened(images, tmp_path, labels=str(labels), label_column=(COMPOSED, "thé"))
    assert data.train.classes == (COMPOSED, "thé")


def test_lists_of_names_in_both_unicode_forms_are_one_class(images: Path, tmp_path: Path) -> None:
    columns = columns_of(label=lambda number: [(COMPOSED, DECOMPOSED)[number % 2], *["tea"] * (number % 3)])
    data = opened(images, tmp_path, labels=str(write(tmp_path / "a.parquet", columns)), label_separator=",")
    assert data.train.classes == (COMPOSED, "tea")


def test_test_images_of_a_label_file_have_the_classes_of_folders_in_another_unicode_form(
    images: Path, tmp_path: Path
) -> None:
    folder = tree(tmp_path / "train", DECOMPOSED, "dog")
    columns = columns_of(label=lambda number: (DECOMPOSED, "dog")[number % 2])
    tested = str(write(tmp_path / "test.csv", columns))
    data = opened(folder, tmp_path, test_data=str(images), test_labels=tested)
    assert counts(data) == {COMPOSED: (4, 15), "dog": (4, 15)}


# Columns and files that may be the wrong ones.


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (
            {"class": "ab", "label": "xy"},
            "In {}, 'label' is read of the columns 'class', 'label'; if that is wrong, name",
        ),
        (
            {"label": "ab", "Label": "xy"},
            "In {}, 'label' is read of the columns 'label', 'Label'; if that is wrong, name",
        ),
        (
            {"label": "ab", "image": "xy"},
            "In {}, 'path' is read of the columns 'path', 'image'; if that is wrong, name",
        ),
    ],
)
def test_the_column_that_is_read_is_told_if_several_could_be(
    columns: dict[str, str], told: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {name: [texts[number % 2] for number in range(NUM_IMAGES)] for name, texts in columns.items()}
    labels = write(tmp_path / "labels.csv", {**columns_of(), **values})
    opened(images, tmp_path, labels=str(labels))
    assert caplog.text.count(told.format(labels)) == 1
    caplog.clear()
    opened(images, tmp_path, labels=str(labels), label_column=("label",), key_column="path")
    assert "is read of the columns" not in caplog.text


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("labels.csv", content)
    return file.getvalue()


@pytest.mark.parametrize("name", ["labels.csv", "labels.json", "labels.parquet"])
@pytest.mark.parametrize(
    ("compress", "kind"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz"), (zipped, "ZIP")]
)
def test_a_compressed_label_file_is_refused_as_such(
    name: str, compress: Callable[[bytes], bytes], kind: str, images: Path, tmp_path: Path
) -> None:
    labels = put(tmp_path / name, compress(b"path,label\n000.png,cat\n"))
    with pytest.raises(UsageError, match=f"is not in UTF-8, but compressed with {kind}.*; decompress it"):
        opened(images, tmp_path, labels=str(labels))


def site(folder: Path, *sites: str, name: str = "metadata.csv", classes: str = "ab") -> Path:
    for each in tree(folder, *sites).iterdir():
        lines = [{"file_name": f"{number}.png", "label": classes[number % len(classes)]} for number in range(4)]
        csv = "file_name,label\n" + "".join(f"{line['file_name']},{line['label']}\n" for line in lines)
        put(each / name, csv if name.endswith("csv") else "\n".join(map(json.dumps, lines)))
    return folder


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_label_files_below_the_folder_are_not_ignored_in_silence(name: str, tmp_path: Path) -> None:
    folder = site(tmp_path / "a", "site_A", "site_B", name=name)
    told = (
        rf"site_A/{name} has labels, such as 'a', and only .* is read; give --data {folder}/site_A, or one label file"
    )
    with pytest.raises(UsageError, match=told):
        opened(folder, tmp_path)
    with pytest.raises(UsageError, match=told):
        opened(tree(tmp_path / "train", "a", "b"), tmp_path, test_data=str(folder))
    with pytest.raises(UsageError, match=told):
        packed(folder, tmp_path / "packed")


def test_label_files_of_training_and_test_images_are_to_be_given_one_by_one(tmp_path: Path) -> None:
    folder = site(tmp_path / "a", "train", "val")
    with pytest.raises(UsageError, match=f"give --data {folder}/train --validation-data {folder}/val, or one"):
        opened(folder, tmp_path)
    assert counts(opened(folder / "train", tmp_path, test_data=str(folder / "val"))) == {"a": (2, 2), "b": (2, 2)}


@pytest.mark.parametrize("content", ["file_name,caption\n0.png,a\n1.png,b\n", "label\na\nb\n", b"\xff\x00\xff"])
def test_tables_in_class_folders_that_are_no_label_files_do_not_matter(content: bytes | str, tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", "cat", "dog")
    put(folder / "cat" / "metadata.csv", content)
    assert opened(folder, tmp_path).train.classes == ("cat", "dog")
    assert opened(site(tmp_path / "b", "cat", "dog", classes="x"), tmp_path, name="b").train.classes == ("cat", "dog")


# Archives.


def parquet(file: Path, labels: Sequence[Any], start: int, names: Sequence[str] = ()) -> Path:
    images = [{"bytes": png(start + number), "path": f"{start + number}.png"} for number in range(len(labels))]
    table = pa.table({"image": images, "label": labels})
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(exist_ok=True)
    pq.write_table(table, file)
    return file


@pytest.mark.parametrize("second", [{"labels": [0, 1] * 4}, {"labels": [0.0, 1.0] * 4}, {"labels": ["0", "1"] * 4}])
@pytest.mark.parametrize("first", [{"labels": [0, 1] * 4, "names": ["cat", "dog"]}, {"labels": ["cat", "dog"] * 4}])
def test_numbers_and_names_of_classes_in_archives_are_refused(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    parquet(tmp_path / "a" / "0.parquet", start=0, **first)
    parquet(tmp_path / "a" / "1.parquet", start=50, **second)
    with pytest.raises(
        UsageError, match=r"labels of .*1.parquet are numbers, such as '0', and .*0.parquet are .* 'cat'"
    ):
        packed(tmp_path / "a", tmp_path / "packed")
    parquet(tmp_path / "a" / "1.parquet", ["dog", "2"] * 4, 50)
    assert packed(tmp_path / "a", tmp_path / "packed") == {"cat": 4, "dog": 8, "2": 4}


def test_the_column_of_archives_that_is_read_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, 1):
        file = parquet(tmp_path / "a" / f"{number}.parquet", ["cat", "dog"], 50 * number)
        pq.write_table(pq.read_table(file).append_column("class", pa.array([0, 1])), file)
    assert packed(tmp_path / "a", tmp_path / "packed") == {"cat": 2, "dog": 2}
    assert (
        caplog.text.count(
            "'label' is read of the columns 'label', 'class'; if that is wrong, name the right one with --label-column."
        )
        == 1
    )


@pytest.mark.parametrize("third", ["train", "extra"])
def test_a_column_of_parquet_archives_says_what_is_tested_on(third: str, tmp_path: Path) -> None:
    for number, parts in enumerate((["train"] * 4, ["TRAIN", third, "test", "test"])):
        file = parquet(tmp_path / "a" / f"{number}.parquet", ["cat", "dog"] * 2, 50 * number)
        pq.write_table(pq.read_table(file).append_column("subset", pa.array(parts).dictionary_encode()), file)
    with pytest.raises(UsageError, match=r"has the splits .*test, train, which would become one data set; pack each"):
        packed(tmp_path / "a", tmp_path / "packed")
    taken = packed(tmp_path / "a", tmp_path / "packed", split="train")
    assert taken == {"cat": 3, "dog": 3 if third == "train" else 2}


def write_tar(file: Path, members: dict[str, bytes], encoding: str = "utf-8") -> Path:
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT, encoding=encoding) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


@pytest.mark.parametrize("form", ["cls", "json", "parquet", "folders"])
def test_both_unicode_forms_of_a_name_are_one_class_in_an_archive(form: str, tmp_path: Path) -> None:
    names = [(COMPOSED, DECOMPOSED, "dog")[number % 3] for number in range(9)]
    if form == "parquet":
        file = parquet(tmp_path / "a.parquet", names, 0)
    elif form == "folders":
        file = write_tar(tmp_path / "a.tar", {f"{name}/{number}.png": png(number) for number, name in enumerate(names)})
    else:
        written = [json.dumps({"label": name}) if form == "json" else f"\ufeff{name}\n" for name in names]
        members = [
            member
            for number, label in enumerate(written)
            for member in ((f"{number}.png", png(number)), (f"{number}.{form}", label.encode()))
        ]
        file = write_tar(tmp_path / "a.tar", dict(members))
    assert packed(file, tmp_path / "packed") == {COMPOSED: 6, "dog": 3}


def test_labels_in_latin_1_are_refused(tmp_path: Path) -> None:
    labels = ["ré", "rè"]  # which would both become r and a replacement character
    members = [
        member
        for number in range(8)
        for member in ((f"{number}.png", png(number)), (f"{number}.cls", labels[number % 2].encode("latin-1")))
    ]
    with pytest.raises(UsageError, match=r"label in '0.cls' is b'r\\xe9', which is not text in UTF-8"):
        packed(write_tar(tmp_path / "a.tar", dict(members)), tmp_path / "packed")
    members[1] = ("0.cls", (1).to_bytes(8, "little"))  # a number as NumPy writes it
    with pytest.raises(UsageError, match=r"label in '0.cls' is b'\\x01\\x00.*', which is not text in UTF-8"):
        packed(write_tar(tmp_path / "a.tar", dict(members)), tmp_path / "packed")


# Classes that would vanish.


def test_a_class_whose_name_begins_with_a_dot_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tree(tmp_path / "a", ".net", "java", "python")
    for name in (".ipynb_checkpoints/1.png", ".git/annex/2.png", "java/._3.png", "java/.Trash-1000/4.png"):
        put(folder / name, png(200))
    assert opened(folder, tmp_path).train.classes == ("java", "python")
    told = "4 images in folders whose names begin with a dot. No image is left in '.net'."
    assert f"Left out below {folder}: {told}" in caplog.text
    caplog.clear()
    files = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.png"))}
    assert packed(write_tar(tmp_path / "a.tar", files), tmp_path / "packed") == {"java": 4, "python": 4}
    assert "4 images in folders whose names begin with a dot" in caplog.text


def test_a_class_whose_name_begins_with_a_dot_is_told_when_it_is_not_copied(
    tmp_path: Path, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tree(tmp_path / "a", ".net", "java")
    assert upload(str(folder), f"{s3_url}/a", Console(file=io.StringIO())).num_files == 4
    assert f"Not copied from {folder}: 4 images in folders whose names begin with a dot." in caplog.text


def test_system_folders_whose_names_begin_with_a_dot_are_left_out_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tree(tmp_path / "a", "cat", "dog", ".ipynb_checkpoints", "cat/.thumbnails", "@eaDir/.x")
    opened(folder, tmp_path)
    assert "Left out" not in caplog.text


def test_a_class_that_is_a_link_is_told_like_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tree(tmp_path / "a", "cat", "dog")
    elsewhere = tree(tmp_path / "b", "owl")
    (elsewhere / "empty").mkdir()
    (elsewhere / "dangling").mkdir()
    (elsewhere / "dangling" / "1.png").symlink_to("/nowhere/1.png")
    for name, target in (("elk", "nowhere"), ("fox", "empty"), ("owl", "owl"), ("yak", "dangling")):
        (folder / name).symlink_to(elsewhere / target)
    (folder / "cat" / "loop").symlink_to(folder)
    assert opened(folder, tmp_path).train.classes == ("cat", "dog", "owl")
    assert "2 links that lead nowhere; 1 empty folder. No image is left in 'elk', 'fox', 'yak'." in caplog.text
    assert len(list_images(open_store(str(folder)))) == 12


@pytest.mark.parametrize(
    "pair",
    [
        ("Cat", "cat"),
        ("hot dog", "hot_dog"),
        ("1", "01"),
        ("cat", "cat\u200b"),
        ("1", "1,00"),
        ("dog", "dog - Copy (2)"),
        ("Ａ1", "a1"),
        ("zero\u200dwidth", "zerowidth"),
    ],
)
def test_classes_that_are_called_nearly_alike_are_told(
    pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_manifest(open_store(str(tree(tmp_path, "other", *pair))))
    first, second = sorted(pair)
    assert f"The classes {first!r}, {second!r} of {tmp_path} are called nearly alike." in caplog.text


def test_classes_whose_names_differ_in_a_sign_are_not_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_manifest(open_store(str(tree(tmp_path, "inf", "-inf", "A", "A+", "A-", "C++", "C#", "C"))))
    assert "alike" not in caplog.text


def test_whole_numbers_of_archives_are_one_class_with_and_without_zeros(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, label in enumerate(("1.0", "1", "2", "2.00")):
            for suffix, content in (("png", png(number)), ("cls", label.encode())):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    pack(str(tmp_path / "a.tar"), str(tmp_path / "packed"), console=Console(file=io.StringIO()))
    manifest = build_manifest(open_store(str(tmp_path / "packed")))
    assert dict(zip(manifest.classes, manifest.class_counts().tolist(), strict=True)) == {"1": 2, "2": 2}


@pytest.mark.parametrize(("labels", "told"), [(("0.25", "0.5", "1.0"), True), (("1.0", "2.0"), False)])
def test_fractions_that_become_classes_are_told(
    labels: Sequence[str], told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tree(tmp_path / "measured", "a", count=12)
    rows = "".join(f"{number}.png,{labels[number % len(labels)]}\n" for number in range(12))
    opened(images / "a", tmp_path, labels=str(put(tmp_path / "l.csv", "path,label\n" + rows)))
    assert ("2 of 3 classes of" in caplog.text and "are fractions, such as 0.25" in caplog.text) == told


def test_minus_one_beside_one_is_a_class(tmp_path: Path) -> None:
    images = tree(tmp_path / "celebrities", "a", "b")
    keys = [f"{path.parent.name}/{path.name}" for path in sorted(images.glob("*/*.png"))]
    rows = "".join(f"{key},{1 - 2 * (number % 2)}\n" for number, key in enumerate(keys))
    data = opened(images, tmp_path, labels=str(put(tmp_path / "l.csv", "path,label\n" + rows)))
    assert data.train.classes == ("-1", "1") and len(data.train) + len(data.validation) == len(keys)


def test_a_table_beside_class_folders_that_is_not_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path, "a", "b")
    put(tmp_path / "README.md", "text")
    put(tmp_path / "a/boxes.csv", "x,y\n1,2\n")
    build_manifest(open_store(str(tmp_path)))
    assert not caplog.text
    put(tmp_path / "labels.csv", "path,label\na/0.png,c\n")
    build_manifest(open_store(str(tmp_path)))
    assert f"Not read beside the images of {tmp_path}: labels.csv. If it says their classes" in caplog.text


def test_lists_of_training_and_test_images_that_are_not_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree(tmp_path / "images", "a", "b")
    for name in ("meta/train.txt", "meta/test.txt", "meta/classes.txt", "images/a/test.txt"):
        put(tmp_path / name, "a/0\n")
    build_manifest(open_store(str(tmp_path)))
    assert f"Not read beside the images of {tmp_path}: meta/test.txt, meta/train.txt. If" in caplog.text
    assert "with --validation-labels and --test-labels" in caplog.text


def test_tables_in_the_folders_of_the_parts_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part in ("train", "valid"):
        put(tmp_path / part / "0.png", png(len(part)))
        put(tmp_path / part / "_classes.csv", "filename, hot dog, cat, size\n0.png, 1, 1, 3\n")
    with pytest.raises(UsageError, match="without class folders"):
        opened(tmp_path, tmp_path)
    assert "train/_classes.csv, valid/_classes.csv" in caplog.text
    labels = str(tmp_path / "train/_classes.csv")
    with pytest.raises(UsageError, match="or the classes among those of 0 and 1: 'hot dog' cat\\."):
        opened(tmp_path / "train", tmp_path, labels=labels)
