"""`raytrain pack` reads what people have already: Parquet, WebDataset tars, and images with metadata.csv."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from raytrain.data.images.image_reader import read_contents
from raytrain.data.labels.manifest import build_manifest
from raytrain.datasets.pack import Labelling, PackResult, pack
from raytrain.errors import UsageError
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
    return pack(str(source), str(folder), Console(file=io.StringIO()), **options)


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
    with pytest.raises(UsageError, match="has archives of training and of test images; pack each by a pattern"):
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
    (red, green) = [
        next(data for label, data in files_of(images).values() if label == name) for name in ("red", "green")
    ]
    hostile = {
        "../../escaped.png": red,
        "../../escaped.cls": b"a",
        "/tmp/.x/hidden.png": green,
        "/tmp/.x/hidden.cls": b"b",
    }
    packed(write_tar(tmp_path / "hostile.tar", hostile), tmp_path / "packed")
    assert contents(tmp_path / "packed") == {
        "hostile/_/_/escaped.png": ("a", red),
        "hostile/tmp/x/hidden.png": ("b", green),
    }
    assert not list(tmp_path.parent.glob("escaped*"))


@pytest.mark.parametrize("name", ["metadata.csv", "labels.csv"])
def test_images_with_a_label_file_beside_them(name: str, images: Path, tmp_path: Path) -> None:
    found = files_of(images)
    rows = [f"{key},{'ab'[number % 2]}\n" for number, key in enumerate(found)]
    (images / name).write_text("file_name,label\n" + "".join(rows))
    packed(images, tmp_path / "packed", labels=Labelling(None if name == "metadata.csv" else str(images / name)))
    expected = {key: ("ab"[number % 2], data) for number, (key, (_, data)) in enumerate(found.items())}
    assert contents(tmp_path / "packed") == expected


def test_what_cannot_be_packed_is_refused(images: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"picture": [b"x"], "label": ["a"]}), tmp_path / "named.parquet")
    with pytest.raises(
        UsageError, match=r"named.parquet has no column of images: none of image, .* columns picture, lab"
    ):
        packed(tmp_path / "named.parquet", tmp_path / "packed")
    (tmp_path / "broken.tar").write_bytes(b"no tar")
    with pytest.raises(UsageError, match=r"broken.tar cannot be read \(.*\); check the file"):
        packed(tmp_path / "broken.tar", tmp_path / "packed")
    with pytest.raises(UsageError, match=r"has neither labels beside its images .* nor class folders, but 1 .png"):
        packed(write_tar(tmp_path / "empty.tar", {"a.png": b"x"}), tmp_path / "packed")
    with pytest.raises(UsageError, match=r"No file that ends in .parquet, .tar, .tgz, .tar.gz matches"):
        packed(tmp_path / "none-*", tmp_path / "packed")
    with pytest.raises(UsageError, match="--labels is for images in folders"):
        packed(tmp_path / "empty.tar", tmp_path / "packed", labels=Labelling("labels.csv"))
