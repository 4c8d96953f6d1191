"""`raytrain pack` reads what people have already: Parquet, WebDataset tars, and images with metadata.csv."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from raytrain.data.images.fetch_and_decode import read_contents
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.label_columns import LabelColumns
from raytrain.data.labels.label_file import read_label_file
from raytrain.data.labels.labelled_images import labelled
from raytrain.data.labels.manifest import list_images
from raytrain.datasets.pack import PackResult, pack
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store
from tests.helpers.small_runs import make_images

Contents = dict[str, tuple[str, bytes]]
"""Class and file of each image, by key."""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return make_images(tmp_path / "images", 12)


def files_of(images: Path) -> Contents:
    files = sorted(images.rglob("*.png"))
    return {str(file.relative_to(images)): (file.parent.name, file.read_bytes()) for file in files}


def packed(source: Path | str, folder: Path | str, **options: Any) -> PackResult:
    return pack(str(source), str(folder), console=Console(file=io.StringIO()), **options)


def contents(folder: Path | str) -> Contents:
    store = open_store(str(folder))
    manifest = build_manifest(store)
    rows = zip(manifest.keys.to_pylist(), manifest.labels, read_contents(store, manifest), strict=True)
    return {key: (manifest.classes[label], bytes(content)) for key, label, content in rows}  # pyright: ignore


def write_tar(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def test_parquet_of_bytes_and_names(images: Path, tmp_path: Path) -> None:
    found = files_of(images)
    labels, data = zip(*found.values(), strict=True)
    pq.write_table(
        pa.table({"path": list(found), "image": list(data), "label": list(labels)}), tmp_path / "one.parquet"
    )
    assert packed(tmp_path / "one.parquet", tmp_path / "packed").num_images == 12
    assert contents(tmp_path / "packed") == {f"one/{key}": value for key, value in found.items()}


def test_parquet_of_views_as_other_writers_have_them(images: Path, tmp_path: Path) -> None:
    files = unique(images)
    labels = pa.array(["cat", "dog"] * 3, pa.string_view())
    pq.write_table(pa.table({"image": pa.array(files, pa.binary_view()), "label": labels}), tmp_path / "a.parquet")
    packed(tmp_path / "a.parquet", tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == dict(zip(files, labels.to_pylist(), strict=True))


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())]
)
def test_parquet_whose_texts_are_bytes(kind: pa.DataType, images: Path, tmp_path: Path) -> None:
    files = unique(images)
    names = [f"{number}.png" for number in range(6)]
    splits = pa.array([b"train", b"test"] * 3).cast(kind)
    columns = {"name": pa.array([name.encode() for name in names]).cast(kind), "image": files, "split": splits}
    pq.write_table(pa.table({**columns, "label": [b"cat", b"dog", b"cat"] * 2}), tmp_path / "a.parquet")
    packed(tmp_path / "a.parquet", tmp_path / "packed", key_column="name", split="train")
    assert sorted(contents(tmp_path / "packed")) == ["a/0.png", "a/2.png", "a/4.png"]
    structs = [{"bytes": data, "path": name.encode()} for data, name in zip(files, names, strict=True)]
    pq.write_table(pa.table({"image": structs, "label": ["cat", "dog", "cat"] * 2}), tmp_path / "b.parquet")
    packed(tmp_path / "b.parquet", tmp_path / "packed-structs")
    assert sorted(contents(tmp_path / "packed-structs")) == [f"b/{name}" for name in names]


def test_a_quality_without_a_size_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--quality 50 is for images that --shorter-side makes smaller"):
        pack(images, tmp_path / "packed", quality=50)
    assert not (tmp_path / "packed").exists()


def test_parquet_with_a_key_that_is_no_text(images: Path, tmp_path: Path) -> None:
    digests = [bytes([200, number]) for number in range(6)]
    table = pa.table({"key": digests, "image": unique(images), "label": ["cat", "dog", "cat"] * 2})
    pq.write_table(table, tmp_path / "a.parquet")
    packed(tmp_path / "a.parquet", tmp_path / "packed")
    assert min(contents(tmp_path / "packed")) == "a/000000000.png"
    with pytest.raises(UsageError, match=r"The column 'key' of .* holds values of type binary that are no text; name"):
        packed(tmp_path / "a.parquet", tmp_path / "again", key_column="key")


def test_parquet_as_hugging_face_writes_it(images: Path, tmp_path: Path) -> None:
    found = files_of(images)
    names = ["red", "green", "blue"]
    structs = [{"bytes": data, "path": None} for _, data in found.values()]
    table = pa.table({"image": structs, "label": [names.index(label) for label, _ in found.values()]})
    features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(table.slice(0, 5), folder / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(5), folder / "train-00001-of-00002.parquet")
    assert packed(folder, tmp_path / "packed").num_classes == 3
    by_content = {data: label for label, data in contents(tmp_path / "packed").values()}
    assert by_content == {data: label for label, data in found.values()}
    assert min(contents(tmp_path / "packed")) == "train-00000-of-00002/000000000.png"
    pq.write_table(table, folder / "test-00000-of-00001.parquet")
    with pytest.raises(UsageError, match="has archives of training and of held-out images; pack each by a pattern"):
        packed(folder, tmp_path / "both")
    assert packed(f"{folder}/train-*", tmp_path / "again").digest == packed(folder / "train-*", tmp_path / "3").digest


def test_tars_in_a_bucket(images: Path, tmp_path: Path, s3_url: str) -> None:
    found = files_of(images)
    members: dict[str, bytes] = {}
    for key, (label, data) in found.items():
        stem = key.removesuffix(".png")
        members |= {f"{stem}.png": data}
        as_json = key.startswith("red")
        members |= (
            {f"{stem}.json": json.dumps({"label": label}).encode()} if as_json else {f"{stem}.cls": label.encode()}
        )
    members["lonely.png"] = b"no label"
    store = open_store(s3_url)
    store.put("tars/000.tar", write_tar(tmp_path / "000.tar", members).read_bytes())
    assert packed(f"{s3_url}/tars", f"{s3_url}/packed").num_written == 1
    assert contents(f"{s3_url}/packed") == {f"000/{key}": value for key, value in found.items()}
    assert packed(f"{s3_url}/tars", f"{s3_url}/packed").num_written == 0  # an interrupted command would continue


def test_a_tar_writes_nothing_outside_of_its_folder(images: Path, tmp_path: Path) -> None:
    red, green, blue = (
        next(data for label, data in files_of(images).values() if label == name) for name in ("red", "green", "blue")
    )
    hostile = {
        "../../escaped.png": red,
        "../../escaped.cls": b"a",
        "/tmp/.x/hidden.png": green,
        "/tmp/.x/hidden.cls": b"b",
        f"/{tmp_path}/outside/two.png": blue,  # pathlib keeps two slashes as a root of its own
        f"/{tmp_path}/outside/two.cls": b"c",
    }
    packed(write_tar(tmp_path / "hostile.tar", hostile), tmp_path / "packed")
    assert contents(tmp_path / "packed") == {
        "hostile/_/_/escaped.png": ("a", red),
        "hostile/tmp/x/hidden.png": ("b", green),
        f"hostile{tmp_path}/outside/two.png": ("c", blue),
    }
    assert not list(tmp_path.parent.glob("escaped*")) and not (tmp_path / "outside").exists()


@pytest.mark.parametrize("name", ["metadata.csv", "labels.csv"])
def test_images_with_a_label_file_beside_them(name: str, images: Path, tmp_path: Path) -> None:
    found = files_of(images)
    rows = [f"{key},{'ab'[number % 2]}\n" for number, key in enumerate(found)]
    (images / name).write_text("file_name,label\n" + "".join(rows))
    packed(images, tmp_path / "packed", labels=None if name == "metadata.csv" else images / name)
    expected = {key: ("ab"[number % 2], data) for number, (key, (_, data)) in enumerate(found.items())}
    assert contents(tmp_path / "packed") == expected


def test_what_cannot_be_packed_is_refused(images: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"picture": [b"x"], "label": ["a"]}), tmp_path / "named.parquet")
    with pytest.raises(UsageError, match=r"named.parquet has none of image, .* columns picture, lab"):
        packed(tmp_path / "named.parquet", tmp_path / "packed")
    (tmp_path / "broken.tar").write_bytes(b"no tar")
    with pytest.raises(UsageError, match=r"broken.tar cannot be read \(.*\); check the file"):
        packed(tmp_path / "broken.tar", tmp_path / "packed")
    with pytest.raises(UsageError, match=r"has neither labels beside its images .* nor class folders, but 1 .png"):
        packed(write_tar(tmp_path / "empty.tar", {"a.png": b"x"}), tmp_path / "packed")
    with pytest.raises(UsageError, match=r"No file that ends in .parquet, .tar, .tgz, .tar.gz matches"):
        packed(tmp_path / "none-*", tmp_path / "packed")
    pq.write_to_dataset(pa.table({"image": [b"x"], "label": ["a"], "split": ["train"]}), tmp_path / "a", ["split"])
    (tmp_path / "a/split=train/_delta_log").mkdir()
    with pytest.raises(UsageError, match=r"is a table whose log, _delta_log/, says which of its Parquet files count"):
        packed(tmp_path / "a/split=train", tmp_path / "packed")
    with pytest.raises(UsageError, match=r"no images below .*give their folder, such as \S+/a/split=train, to"):
        packed(tmp_path / "a", tmp_path / "packed")
    for labelling in ({"labels": "labels.csv"}, {"label_separator": "|"}, {"label_column": ("a", "b")}):
        with pytest.raises(UsageError, match=r"--labels, .* are for images in folders"):
            packed(tmp_path / "empty.tar", tmp_path / "packed", **labelling)


# Archives in which names repeat, labels are missing, or members are called otherwise.


def parquet(file: Path, classes: list[str], **columns: Any) -> Path:
    features = {"label": {"names": classes, "_type": "ClassLabel"}} if classes else {}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file)
    return file


def unique(images: Path, count: int = 6) -> list[bytes]:
    return [data for _, data in files_of(images).values()][:count]


def labels_by_content(folder: Path) -> dict[bytes, str]:
    return {data: label for label, data in contents(folder).values()}


def test_base_names_that_repeat_are_no_keys(images: Path, tmp_path: Path) -> None:
    files = unique(images)
    rows = [{"bytes": data, "path": f"{number % 3}.png"} for number, data in enumerate(files)]
    file = parquet(tmp_path / "a.parquet", ["cat", "dog"], image=rows, label=[0, 0, 0, 1, 1, 1])
    packed(file, tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == dict(zip(files, ["cat"] * 3 + ["dog"] * 3, strict=True))


def test_keys_that_repeat_are_refused_with_the_first_three(images: Path, tmp_path: Path) -> None:
    file = parquet(
        tmp_path / "a.parquet", [], image=unique(images), label=list("ababab"), path=["x.png"] * 4 + ["y.png", "z.png"]
    )
    with pytest.raises(UsageError, match=r"has 3 images with the name of another one: x.png, x.png, x.png"):
        packed(file, tmp_path / "packed")


def test_names_that_differ_in_their_unicode_form_are_refused(images: Path, tmp_path: Path) -> None:
    keys = [unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD")]
    file = parquet(tmp_path / "a.parquet", [], image=unique(images, 2), label=["a", "b"], path=keys)
    with pytest.raises(UsageError, match=r"1 key for several images .* suffix or Unicode form only"):
        packed(file, tmp_path / "packed")


def test_a_label_in_an_archive_that_looks_like_several_is_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = parquet(tmp_path / "a.parquet", [], image=unique(images, 3), label=["a", "b", "a|b"])
    packed(file, tmp_path / "packed")
    assert "The label 'a|b' of" in caplog.text


def test_archives_of_one_name_in_two_folders_are_both_packed(images: Path, tmp_path: Path) -> None:
    files = unique(images)
    for number in (0, 1):
        (tmp_path / "in" / "ab"[number]).mkdir(parents=True)
        three = files[3 * number : 3 * number + 3]
        parquet(tmp_path / "in" / "ab"[number] / "0000.parquet", [], image=three, label=list("xyx"))
    packed(f"{tmp_path}/in/*/0000.parquet", tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == dict(zip(files, "xyxxyx", strict=True))


@pytest.mark.parametrize("name", ["a", "lost+found", ".a"])
def test_images_with_names_that_no_listing_shows_are_packed(name: str, images: Path, tmp_path: Path) -> None:
    files = unique(images)
    keys = ["", ".png", "@eaDir/1.png", "../lost+found/2.png", ".x/3.png", "4.png"]
    packed(parquet(tmp_path / f"{name}.parquet", [], image=files, label=list("ababab"), path=keys), tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == dict(zip(files, "ababab", strict=True))
    names = {key.partition("/")[2] for key in contents(tmp_path / "packed")}
    assert names == {"000000000.png", "_.png", "_@eaDir/1.png", "_/_lost+found/2.png", "x/3.png", "4.png"}


def test_missing_labels_and_bytes_are_left_out_and_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"bytes": data, "path": None} for data in unique(images)]
    rows[0] = {"bytes": None, "path": "0.png"}
    structs = [*rows, None]
    file = parquet(tmp_path / "a.parquet", ["cat", "dog"], image=structs, label=[0, -1, 0, 1, None, 1, 1])
    packed(file, tmp_path / "packed")
    assert sorted(labels_by_content(tmp_path / "packed").values()) == ["cat", "dog", "dog"]
    assert "2 rows without the bytes of an image." in caplog.text
    assert f"Not used of {file}: 2 without a label (2 empty)." in caplog.text


def test_a_parquet_file_with_a_hole_that_no_checksum_shows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"image": [bytes([number]) * 500 for number in range(1, 101)], "label": ["a", "b"] * 50})
    pq.write_table(table, file, compression="none", use_dictionary=False)
    start = file.read_bytes().index(bytes([31]) * 500) + 100
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(bytes(4096))
    with pytest.raises(
        UsageError, match=r"a\.parquet has images of 0 bytes in row 32 and the next 7, as if zeros stood in place"
    ):
        packed(file, tmp_path / "packed")


@pytest.mark.parametrize(
    "names",
    [
        ("shoe_v1.0.jpg", "shoe_v1.0.cls", "shoe_v1.1.jpg", "shoe_v1.1.cls"),
        ("0.input.jpg", "0.cls", "1.input.jpg", "1.cls"),
        ("./0.jpg", "./0.json", "./1.jpg", "./1.json"),
    ],
)
def test_webdataset_members_with_dots_in_their_names(names: tuple[str, ...], images: Path, tmp_path: Path) -> None:
    one, other = unique(images, 2)
    cat, dog = (b'{"label": "cat"}', b'{"cls": "dog"}') if names[1].endswith("json") else (b"cat", b"dog\n")
    tar = write_tar(tmp_path / "a.tar", dict(zip(names, (one, cat, other, dog), strict=True)))
    packed(tar, tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == {one: "cat", other: "dog"}


def test_a_tar_of_class_folders(images: Path, tmp_path: Path) -> None:
    one, other = unique(images, 2)
    packed(write_tar(tmp_path / "a.tar", {"data/cat/1.png": one, "data/dog/1.png": other}), tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == {one: "cat", other: "dog"}


def test_folders_of_a_tar_that_are_no_classes_are_refused_as_those_of_a_folder(images: Path, tmp_path: Path) -> None:
    content = next(images.rglob("*.png")).read_bytes()
    for names in (("a/airfield", "b/beach"), ("train", "extra")):
        tar = write_tar(tmp_path / "x.tar", {f"{name}/{number}.png": content for name in names for number in range(2)})
        with pytest.raises(UsageError, match=r"no classes; give .* Unpack the archive for that\."):
            packed(tar, tmp_path / "packed")


def test_a_class_folder_of_a_tar_may_be_called_none_and_a_label_file_in_the_tar_is_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = unique(images, 2)
    members = {"None/1.png": one, "-1/1.png": other, "labels.csv": b"path,label\nNone/1.png,cat\n"}
    packed(write_tar(tmp_path / "a.tar", members), tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == {one: "None", other: "-1"}
    assert "the folders are the classes, and .csv files in a tar are not read" in caplog.text


def test_shards_do_not_hide_images_that_are_there(images: Path, tmp_path: Path) -> None:
    one, other = unique(images, 2)
    tar = write_tar(tmp_path / "a.tar", {"cat/1.png": one, "dog/1.png": other})
    (tmp_path / "full/bird").mkdir(parents=True)
    (tmp_path / "full/bird/1.PNG").write_bytes(one)
    with pytest.raises(UsageError, match=r"full has images already, such as bird/1.PNG, and --data would read the sh"):
        packed(tar, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["bird"]
    for _ in range(2):  # what a pack has written before is no obstacle
        packed(tar, tmp_path / "new")


def test_a_tar_whose_labels_are_elsewhere_is_refused(images: Path, tmp_path: Path) -> None:
    one, other = unique(images, 2)
    members = {"0.jpg": one, "1.jpg": other, "0.cls": b"a", "1.cls": b"b"}
    with pytest.raises(UsageError, match=r"None of the 2 images of .* is beside its label"):
        packed(write_tar(tmp_path / "a.tar", members), tmp_path / "packed")
    with pytest.raises(UsageError, match=r"A label in a .json file is \[0, 2\], and one class per image is expected"):
        packed(write_tar(tmp_path / "b.tar", {"0.jpg": one, "0.json": b'{"label": [0, 2]}'}), tmp_path / "packed")


def test_hard_links_of_a_tar_are_images_and_whatever_is_none_is_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = unique(images, 2)
    members = {"cat/1.png": one, "dog/1.png": other, "dog/2.tif": b"x", "classes.json": b"{}"}
    members |= {f"{folder}/cat/1.png": one for folder in (".ipynb_checkpoints", "__MACOSX", "cat/@eaDir")}
    with tarfile.open(write_tar(tmp_path / "a.tar", members), "a") as tar:
        for name, kind in (("dog/3.png", tarfile.LNKTYPE), ("dog/4.png", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "dog/1.png"
            tar.addfile(link)
    packed(tmp_path / "a.tar", tmp_path / "packed")
    found = {key: label for key, (label, _) in contents(tmp_path / "packed").items()}
    assert found == {"a/cat/1.png": "cat", "a/dog/1.png": "dog", "a/dog/3.png": "dog"}
    assert "1 .tif file" in caplog.text and "1 link." in caplog.text and "tables" not in caplog.text


def test_a_tar_that_was_made_in_a_hidden_folder_is_read(images: Path, tmp_path: Path) -> None:
    one, other = unique(images, 2)
    members = {"/home/me/.cache/cat/1.png": one, "/home/me/.cache/dog/1.png": other}
    packed(write_tar(tmp_path / "a.tar", members), tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == {one: "cat", other: "dog"}


def test_a_tar_that_is_damaged_in_the_middle_is_not_taken_for_a_shorter_one(images: Path, tmp_path: Path) -> None:
    names = [f"{number % 2}/{number}.png" for number in range(6)]
    file = write_tar(tmp_path / "a.tar", dict(zip(names, unique(images), strict=True)))
    file.write_bytes(file.read_bytes().replace(b"1/3.png", b"1/x.png"))  # not the checksum
    with pytest.raises(UsageError, match=r"a.tar cannot be read \(it is damaged at byte [\d,]+\); check the file"):
        packed(file, tmp_path / "packed")


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        ([0.0, 1.0], [], {"0", "1"}),
        ([0.0, 1.0, float("nan")], ["cat", "dog"], {"cat", "dog"}),
        ([b"cat", b"dog"], [], {"cat", "dog"}),
    ],
)
def test_labels_of_other_types_are_the_same_classes(
    labels: list[Any], classes: list[str], expected: set[str], images: Path, tmp_path: Path
) -> None:
    packed(
        parquet(tmp_path / "a.parquet", classes, image=unique(images, len(labels)), label=labels), tmp_path / "packed"
    )
    assert set(labels_by_content(tmp_path / "packed").values()) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["-1", "1", "1"], {"-1": 1, "1": 2}),
        (["-1", "0", "1"], {"0": 1, "1": 1}),
        (["NA", "0", "1.0"], {"0": 1, "1": 1}),
        (["NA", "EU", "EU"], {"EU": 2, "NA": 1}),
        (["None", "a", "b"], {"a": 1, "b": 1}),
    ],
)
def test_the_same_texts_mean_no_label_in_archives_and_label_files(
    labels: list[str], expected: dict[str, int], images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed(parquet(tmp_path / "a.parquet", [], image=unique(images, 3), label=labels), tmp_path / "packed")
    assert Counter(labels_by_content(tmp_path / "packed").values()) == expected
    (tmp_path / "a.csv").write_text("path,label\n" + "".join(f"{n}.png,{text}\n" for n, text in enumerate(labels)))
    table = read_label_file(str(tmp_path / "a.csv"), LabelColumns())
    assert Counter(table.labels) - Counter([""] * 3) == expected
    assert caplog.text.count("without a label (1 ") == (0 if sum(expected.values()) == 3 else 2)


def test_a_label_without_a_name_among_the_classes_is_refused(images: Path, tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", ["cat", "dog"], image=unique(images, 3), label=[0, 1, 2])
    with pytest.raises(UsageError, match="has the label 2, and names of 2 classes"):
        packed(file, tmp_path / "packed")


def test_splits_in_a_parquet_file_are_packed_one_by_one(images: Path, tmp_path: Path) -> None:
    files = unique(images, 4)
    parts = ["Train", "Train ", "Test", "Test"]  # as a database pads texts
    file = parquet(tmp_path / "a.parquet", [], image=files, label=["a", "b", "a", "b"], Split=parts)
    with pytest.raises(UsageError, match=r"has the splits test, train, .* --split train"):
        packed(file, tmp_path / "packed")
    packed(file, tmp_path / "packed", split="train")
    assert labels_by_content(tmp_path / "packed") == {files[0]: "a", files[1]: "b"}


@pytest.mark.parametrize("keys", [["x" * 300, "y"], ["a.png", "a.png/b.png"]])
def test_keys_that_cannot_be_files_are_refused(keys: list[str], images: Path, tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [], image=unique(images, 2), label=["a", "b"], path=keys)
    with pytest.raises(UsageError, match=r"cannot be a file \(.*\); name another column with --key-column"):
        packed(file, tmp_path / "packed")


def test_a_label_file_beside_its_images_is_no_archive(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = sorted(files_of(images))
    parquet(images / "labels.parquet", [], path=keys, label=["a", "b"] * 6)
    with pytest.raises(UsageError, match=r"labels.parquet has none of image, .* give a label file with --labels"):
        packed(images, tmp_path / "packed")
    assert "3 that are no archives, such as blue" in caplog.text
    assert packed(images, tmp_path / "packed", labels=images / "labels.parquet").num_images == 12


def test_a_folder_called_like_an_archive_holds_archives(images: Path, tmp_path: Path, s3_url: str) -> None:
    (tmp_path / "a.parquet").mkdir()
    file = parquet(tmp_path / "a.parquet" / "part-0.parquet", [], image=unique(images, 2), label=["a", "b"])
    open_store(s3_url).put("a.parquet/part-0.parquet", file.read_bytes())
    for folder in (f"{tmp_path}/a.parquet", f"{s3_url}/a.parquet"):
        for source in (folder, f"{folder}/", f"{folder}/*.parquet"):
            assert packed(source, tmp_path / "packed").num_images == 2


@pytest.mark.parametrize("suffix", [".PARQUET", ".TAR", ".Tar"])
def test_the_case_of_an_archives_suffix_does_not_matter(suffix: str, images: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    one, other = unique(images, 2)
    if suffix == ".PARQUET":
        parquet(tmp_path / f"in/A{suffix}", [], image=[one, other], label=["cat", "dog"], path=["cat/1", "dog/1"])
    else:
        write_tar(tmp_path / f"in/A{suffix}", {"cat/1.png": one, "dog/1.png": other})
    for source in (tmp_path / "in", tmp_path / f"in/A{suffix}", tmp_path / "in/A*"):
        packed(source, tmp_path / "packed")
        assert contents(tmp_path / "packed") == {"A/cat/1.png": ("cat", one), "A/dog/1.png": ("dog", other)}


@pytest.mark.parametrize("folder", ["in", "in/data"])
def test_hidden_files_and_folders_called_like_archives_are_none(folder: str, images: Path, tmp_path: Path) -> None:
    """A Mac writes ``._part-0.parquet`` beside ``part-0.parquet``; Spark writes folders of such names."""
    (tmp_path / folder / "old.parquet").mkdir(parents=True)
    parquet(tmp_path / folder / "part-0.parquet", [], image=unique(images, 2), label=["a", "b"])
    (tmp_path / folder / "._part-0.parquet").write_bytes(b"\0\5\x16\7" + bytes(400))
    for source in (tmp_path / "in", tmp_path / folder / "*.parquet"):
        assert packed(source, tmp_path / "packed").num_images == 2


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"image": ["/a/1.png", "/a/2.png"], "label": ["a", "b"]}, "holds values of type string"),
        ({"image": [[[1, 2]], [[3, 4]]], "label": ["a", "b"]}, "holds values of type list"),
        ({"image": [b"x", b"y"], "label": [[0, 2], [1]]}, "one class per image is expected"),
        ({"image": [b"x", b"y"], "labels": [0, 1]}, "name the right one with --label-column"),
    ],
)
def test_columns_that_hold_anything_else_are_refused(columns: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=expected):
        packed(parquet(tmp_path / "a.parquet", [], **columns), tmp_path / "packed")


def test_columns_of_other_names_are_read_by_option(images: Path, tmp_path: Path) -> None:
    files = unique(images, 2)
    file = parquet(tmp_path / "a.parquet", [], img=files, fine_label=["a", "b"], id=["p", "q"])
    packed(file, tmp_path / "packed", key_column="id", label_column="fine_label")
    assert contents(tmp_path / "packed") == {"a/p.png": ("a", files[0]), "a/q.png": ("b", files[1])}


@pytest.mark.parametrize("names", [("train.parquet", "test.parquet"), ("c10-train-0.parquet", "c10-val-0.parquet")])
def test_archives_of_training_and_test_images_are_refused(names: tuple[str, str], images: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        parquet(tmp_path / "in" / name, [], image=unique(images, 2), label=["a", "b"])
    for source in (tmp_path / "in", f"{tmp_path}/in/*.parquet"):
        with pytest.raises(UsageError, match="has archives of training and of held-out images"):
            packed(source, tmp_path / "packed")


def test_archives_in_folders_of_training_and_test_images_are_refused_and_a_folder_of_one_part_is_packed(
    images: Path, tmp_path: Path
) -> None:
    for part in ("train", "test"):
        (tmp_path / "train_val" / part).mkdir(parents=True)
        parquet(tmp_path / "train_val" / part / "0.parquet", [], image=unique(images, 2), label=["a", "b"])
    with pytest.raises(UsageError, match=f"each by a pattern, such as {tmp_path}/train_val/train/\\*"):
        packed(f"{tmp_path}/train_val/*/0.parquet", tmp_path / "packed")
    assert packed(f"{tmp_path}/train_val/train/*", tmp_path / "packed").num_images == 2


@pytest.mark.parametrize("beside", [[], ["README.md"], ["README.md", "images.zip"]])
def test_a_repository_of_the_hub_has_its_archives_in_data(beside: list[str], images: Path, tmp_path: Path) -> None:
    (tmp_path / "in" / "data").mkdir(parents=True)
    for name in beside:
        (tmp_path / "in" / name).write_text("x")
    parquet(tmp_path / "in" / "data" / "train-00000-of-00001.parquet", [], image=unique(images, 2), label=["a", "b"])
    assert packed(tmp_path / "in", tmp_path / "packed").num_images == 2
    parquet(tmp_path / "in" / "data" / "test-00000-of-00001.parquet", [], image=unique(images, 2), label=["a", "b"])
    with pytest.raises(UsageError, match="pack each by a pattern") as refused:
        packed(tmp_path / "in", tmp_path / "packed")
    pattern = str(refused.value).rpartition("such as ")[2].rstrip(".")
    assert packed(pattern, tmp_path / "packed").num_images == 2


def test_archives_that_are_links_are_read_unless_they_lead_out(images: Path, tmp_path: Path) -> None:
    # As in the cache of the hub: snapshots/REVISION/data has links to blobs/.
    cache = tmp_path / "datasets--a--b"
    (cache / "blobs").mkdir(parents=True)
    table = pa.table({"image": unique(images), "label": ["cat", "dog", "cat"] * 2})
    pq.write_table(table, cache / "blobs" / "ab12")
    (cache / "snapshots" / "rev" / "data").mkdir(parents=True)
    (cache / "snapshots" / "rev" / "data" / "train-0.parquet").symlink_to("../../../blobs/ab12")
    for source in ("snapshots/rev", "snapshots/rev/data", "snapshots/rev/data/train-*"):
        with pytest.raises(UsageError, match=r"1 of 1 files in .* are links that lead out of it.*cp -rL"):
            packed(cache / source, tmp_path / "packed")
    (cache / "snapshots" / "rev" / "data" / "train-0.parquet").unlink()
    (cache / "blobs" / "ab12").rename(cache / "snapshots" / "rev" / "data" / ".ab12")
    (cache / "snapshots" / "rev" / "data" / "train-0.parquet").symlink_to(".ab12")
    assert packed(cache / "snapshots" / "rev", tmp_path / "packed").num_images == 6


def test_a_table_with_splits_is_packed_split_by_split(images: Path, tmp_path: Path) -> None:
    keys = sorted(files_of(images))
    rows = "".join(f"{key},{'ab'[n % 2]},{'test' if n < 4 else 'train'}\n" for n, key in enumerate(keys))
    (images / "metadata.csv").write_text("file_name,label,split\n" + rows)
    with pytest.raises(UsageError, match=r"has the splits test, train, .* --split train"):
        packed(images, tmp_path / "packed")
    packed(images, tmp_path / "packed", split="train")
    assert sorted(contents(tmp_path / "packed")) == keys[4:]


def test_images_with_several_classes_are_packed_and_trained_on_with_the_same_file(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
    file = tmp_path / "labels.csv"
    rows = [f"{key},{('cat|dog', 'cat', '')[place % 3]}" for place, key in enumerate(keys)]
    file.write_text("\n".join(["path,label", *rows]))
    columns = LabelColumns(separator="|")
    result = packed(images, tmp_path / "packed", labels=file, label_separator="|")
    assert result.num_images == len(keys)
    assert f"such as 'cat|dog'; train on them with --labels {file}" in caplog.text
    shards = open_store(str(tmp_path / "packed"))
    read = labelled(list_images(shards), read_label_file(str(file), columns, [shards.url]))
    assert len(read) == len(keys) and read.classes == ("cat", "dog")
    assert read.class_counts().tolist() == [sum(name in row.partition(",")[2] for row in rows) for name in read.classes]


@pytest.mark.parametrize(
    "labels",
    [
        pa.array([True, False]),
        pa.array([0.1, 1.0], pa.float32()),
        pa.array([2**63, 2**63 + 1], pa.uint64()),
        pa.array([10**9, 2 * 10**9], pa.timestamp("ns")),
        pa.array([b"a", b"b"]).dictionary_encode(),
    ],
)
def test_a_label_is_the_same_text_in_an_archive_and_in_a_label_file(labels: Any, images: Path, tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", [], image=unique(images, 2), label=labels)
    packed(tmp_path / "a.parquet", tmp_path / "packed")
    pq.write_table(pa.table({"path": ["1.png", "2.png"], "label": labels}), tmp_path / "labels.parquet")
    table = read_label_file(str(tmp_path / "labels.parquet"), LabelColumns())
    assert build_manifest(open_store(str(tmp_path / "packed"))).classes == tuple(sorted(table.labels))


def test_numbers_of_classes_whose_names_are_numbers_are_numbers(images: Path, tmp_path: Path) -> None:
    files = unique(images, 2)
    parquet(tmp_path / "a.parquet", ["1", "0"], image=files, label=[0, 1])
    packed(tmp_path / "a.parquet", tmp_path / "packed")
    assert labels_by_content(tmp_path / "packed") == dict(zip(files, ("1", "0"), strict=True))


# Archives that are not whole.


def labelled_members(images: Path, start: int, stop: int) -> dict[str, bytes]:
    """Return members of a WebDataset: the images from ``start`` to ``stop``, each with its label."""
    files = unique(images, 12)
    members: dict[str, bytes] = {}
    for number in range(start, stop):
        members |= {f"{number:04d}.png": files[number], f"{number:04d}.cls": b"ab"[number % 2 :][:1]}
    return members


def in_class_folders(images: Path, start: int, stop: int) -> dict[str, bytes]:
    members = labelled_members(images, start, stop)
    return {f"{'ab'[int(name[:4]) % 2]}/{name}": data for name, data in members.items() if name.endswith("png")}


@pytest.mark.parametrize("layout", [labelled_members, in_class_folders])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_tars_that_follow_each_other_in_one_file_are_refused(
    layout: Callable[[Path, int, int], dict[str, bytes]],
    compress: Callable[[bytes], bytes],
    images: Path,
    tmp_path: Path,
) -> None:
    parts = [write_tar(tmp_path / "part.tar", layout(images, *bounds)).read_bytes() for bounds in ((0, 6), (6, 12))]
    (tmp_path / "a.tar").write_bytes(b"".join(map(compress, parts)))
    with pytest.raises(
        UsageError, match=r"a.tar cannot be read \(zeros from byte [\d,]+ on.* several tars in one file"
    ):
        packed(tmp_path / "a.tar", tmp_path / "packed")
    (tmp_path / "a.tar").write_bytes(compress(parts[0]))
    assert packed(tmp_path / "a.tar", tmp_path / "packed").num_images == 6


@pytest.mark.parametrize(
    ("first", "last"),
    [("0003.png", "0005.png"), ("0003.cls", "0004.png"), ("0011.png", "0011.cls")],
    ids=["two samples", "within a sample", "the last image"],
)
def test_a_hole_of_zeros_in_a_tar_is_not_taken_for_its_end(first: str, last: str, images: Path, tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", labelled_members(images, 0, 12))
    content = file.read_bytes()
    start, stop = content.index(first.encode()), content.index(last.encode())
    file.write_bytes(content[:start] + bytes(stop - start) + content[stop:])
    with pytest.raises(UsageError, match=r"followed by data at byte [\d,]+: it has a hole"):
        packed(file, tmp_path / "packed")


def test_a_tar_that_ends_between_two_members_is_refused(images: Path, tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", labelled_members(images, 0, 12))
    content = file.read_bytes()
    stop = content.index(b"0006.png")
    for compress in (bytes, gzip.compress):
        file.write_bytes(compress(content[:stop]))
        with pytest.raises(UsageError, match=rf"it is cut off: the mark of its end is missing at byte {stop:,}"):
            packed(file, tmp_path / "packed")
    file.write_bytes(content[: content.index(b"0011.cls") + 1024 + tarfile.BLOCKSIZE])  # half of the mark is enough
    assert packed(file, tmp_path / "packed").num_images == 12


def test_the_checksum_of_a_compressed_tar_is_checked(images: Path, tmp_path: Path) -> None:
    content = write_tar(tmp_path / "a.tar", labelled_members(images, 0, 12)).read_bytes()
    for compress, at in ((gzip.compress, -6), (bz2.compress, -3), (lzma.compress, -20)):
        damaged = bytearray(compress(content))
        damaged[at] ^= 1
        (tmp_path / "a.tgz").write_bytes(damaged)
        with pytest.raises(UsageError, match=r"a.tgz cannot be read \(.+\); check the file"):
            packed(tmp_path / "a.tgz", tmp_path / "packed")


@pytest.mark.parametrize("compression", ["snappy", "gzip"])
def test_a_parquet_file_with_a_hole_is_refused(compression: str, images: Path, tmp_path: Path) -> None:
    noise = [np.random.default_rng(number).bytes(4000) for number in range(60)]
    table = pa.table({"image": noise, "label": ["ab"[number % 2] for number in range(60)]})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, compression=compression, row_group_size=20)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 70_000] = bytes(70_000)
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"a.parquet cannot be read \(.+\); check the file"):
        packed(file, tmp_path / "packed")


def test_checksums_in_a_parquet_file_are_checked(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"image": unique(images), "label": list("ababab")})
    pq.write_table(table, file, compression="none", write_page_checksum=True)
    file.write_bytes(file.read_bytes().replace(b"IDAT", b"TADI", 1))
    with pytest.raises(UsageError, match=r"a.parquet cannot be read \(.*CRC.*\); check the file"):
        packed(file, tmp_path / "packed")


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.parquet"])
def test_an_archive_that_is_not_there_is_refused(name: str, tmp_path: Path, s3_url: str) -> None:
    for source in (f"{tmp_path}/{name}", f"{s3_url}/{name}"):
        with pytest.raises(UsageError, match=f"There is no file {source}; check the path"):
            packed(source, tmp_path / "packed")


def test_a_prefix_that_is_not_there_is_refused(tmp_path: Path, s3_url: str) -> None:
    with pytest.raises(UsageError, match=f"There are no images below {s3_url}/none, nor other files; check the path"):
        packed(f"{s3_url}/none", tmp_path / "packed")
    with pytest.raises(UsageError, match=r"No file that ends in .* matches .*/none/\*; check the path"):
        packed(f"{s3_url}/none/*", tmp_path / "packed")
    with pytest.raises(StorageError, match=r"There is no folder .*/none; check the path"):
        packed(tmp_path / "none", tmp_path / "packed")


# Samples of several images.


def sample(images: Path, *suffixes: str) -> dict[str, bytes]:
    """Return members of two samples, whose first images are the first two of ``images``, and whose labels are a, b."""
    files = unique(images, 12)
    members: dict[str, bytes] = {}
    for number in range(2):
        pictures = [suffix for suffix in suffixes if suffix != "cls"]
        for suffix in suffixes:
            content = b"ab"[number:][:1] if suffix == "cls" else files[2 * pictures.index(suffix) + number]
            members[f"{number}.{suffix}"] = content
    return members


@pytest.mark.parametrize(
    ("suffixes", "photograph", "image_suffix"),
    [
        (("jpg", "png", "cls"), "jpg", None),
        (("cls", "png", "JPEG"), "JPEG", None),
        (("input.jpg", "seg.png", "cls"), "input.jpg", None),
        (("jpg", "png", "cls"), "png", "png"),
        (("png", "seg.png", "cls"), "png", ".png"),
        (("png", "seg.png", "cls"), "seg.png", "seg.png"),
        (("left.jpg", "right.jpg", "cls"), "right.jpg", "right.jpg"),
    ],
)
def test_the_photograph_of_a_sample_is_packed_and_not_its_mask(
    suffixes: tuple[str, ...],
    photograph: str,
    image_suffix: str | None,
    images: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = sample(images, *suffixes)
    file = write_tar(tmp_path / "a.tar", members)
    packed(file, tmp_path / "packed", image_suffix=image_suffix)
    expected = {members[f"0.{photograph}"]: "a", members[f"1.{photograph}"]: "b"}
    assert labels_by_content(tmp_path / "packed") == expected
    assert "2 second images of a sample, such as masks" in caplog.text


def test_images_of_a_sample_that_cannot_be_told_apart_are_asked_for(images: Path, tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", sample(images, "png", "webp", "cls"))
    match = r"a.tar has one label beside 0.png and 0.webp; name the image to take with --image-suffix, such as .* png\."
    for image_suffix in (None, "bmp"):
        with pytest.raises(UsageError, match=match):
            packed(file, tmp_path / "packed", image_suffix=image_suffix)
    write_tar(file, sample(images, "left.jpg", "right.jpg", "cls"))
    with pytest.raises(UsageError, match="if a sample has several images, name the one to take with --image-suffix"):
        packed(file, tmp_path / "packed")
    with pytest.raises(UsageError, match=r"--image-suffix is png, which names .* and .*images is none; leave it out"):
        packed(images, tmp_path / "packed", image_suffix="png")


def test_changed_images_of_an_archive_are_packed_again(images: Path, tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", labelled_members(images, 0, 12))
    packed(file, tmp_path / "packed")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"IDAT", b"TADI", 1))  # of the same length
    assert packed(file, tmp_path / "packed").num_written == 1
    assert any(b"TADI" in data for data in labels_by_content(tmp_path / "packed"))
