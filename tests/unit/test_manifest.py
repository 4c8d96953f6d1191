"""The manifest of a data set: which images it lists, its digest, its Parquet file, and train-test splits."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.hold_out import hold_out
from raytrain.data.labels.manifest import UNLABELLED, Manifest, list_images
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store
from raytrain.storage.store import Store

FILES = ["dog/1.jpg", "cat/2.PNG", "cat/1.jpeg", "more/cat/3.webp", "owl/0.bmp", "owl/1.Gif"]
OTHERS = [
    "readme.txt",
    "top.jpg",
    "cat/.hidden.jpg",
    ".ipynb_checkpoints/1.jpg",
    "cat/._1.jpg",
    "cat/notes.json",
    "dog/jpg",
]

WRITE = """
import sys
from raytrain.data.labels.folders import build_manifest
from raytrain.storage.open import open_store
build_manifest(open_store(sys.argv[1])).to_parquet()
assert "pandas" not in sys.modules
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "images"))


def fill(store: Store, *paths: str) -> Store:
    for path in paths:
        store.put(path, path.encode(errors="replace"))
    return store


def numbered(store: Store, **num_images: int) -> Manifest:
    return build_manifest(fill(store, *(f"{name}/{i:03d}.jpg" for name, num in num_images.items() for i in range(num))))


def keys(manifest: Manifest) -> list[str]:
    return manifest.keys.to_pylist()  # pyright: ignore[reportReturnType]


def assert_same(one: Manifest, other: Manifest) -> None:
    assert keys(one) == keys(other) and one.etags.to_pylist() == other.etags.to_pylist()
    assert (one.labels == other.labels).all() and one.labels.dtype == other.labels.dtype == np.int32
    assert (one.sizes_bytes == other.sizes_bytes).all() and one.sizes_bytes.dtype == other.sizes_bytes.dtype == np.int64
    assert (one.classes, one.url, one.left_out) == (other.classes, other.url, other.left_out)
    assert one.digest == other.digest


def test_images_are_labelled_by_their_folder(store: Store) -> None:
    manifest = build_manifest(fill(store, *FILES, *OTHERS))
    assert manifest.classes == ("cat", "dog", "more", "owl")
    assert keys(manifest) == sorted(FILES) and len(manifest) == 6
    assert [manifest.classes[label] for label in manifest.labels] == ["cat", "cat", "dog", "more", "owl", "owl"]
    assert manifest.sizes_bytes.tolist() == [len(key) for key in keys(manifest)]
    assert manifest.etags.to_pylist() == [
        {found.path: found.etag for found in store.list()}[key] for key in keys(manifest)
    ]
    assert sum(manifest.left_out.values()) == len(OTHERS) and manifest.url == store.url


def test_real_images_have_the_same_manifest_in_a_folder_and_in_s3(cifar10_folder: Path, s3_url: str) -> None:
    folder, bucket = open_store(str(cifar10_folder / "train")), open_store(s3_url)
    for found in folder.list():
        bucket.put(found.path, folder.get(found.path))
    one, other = build_manifest(folder), build_manifest(bucket)
    assert len(one) == 300 and len(one.classes) == 10 and set(Counter(one.labels.tolist()).values()) == {30}
    assert one.digest == other.digest and keys(one) == keys(other) and one.url != other.url


def test_images_without_labels_can_be_listed(store: Store) -> None:
    manifest = list_images(fill(store, *FILES, *OTHERS))
    assert keys(manifest) == sorted([*FILES, "top.jpg"])
    assert (
        set(manifest.labels.tolist()) == {UNLABELLED}
        and manifest.classes == ()
        and sum(manifest.left_out.values()) == len(OTHERS) - 1
    )


def test_the_digest_depends_on_keys_labels_and_sizes(store: Store) -> None:
    manifest = build_manifest(fill(store, *FILES))
    store.put("cat/2.PNG", b"as many b")  # The same size as before, so the digest does not change.
    assert build_manifest(store).digest == manifest.digest
    assert build_manifest(store).etags != manifest.etags
    store.put("owl/0.bmp", b"shorter")
    changed = [
        build_manifest(store),
        build_manifest(store, classes=("dog", "cat", "owl", "more")),
        manifest.select(np.arange(5)),
        manifest.select(np.arange(6)[::-1]),
        build_manifest(fill(store, "cat/2b.png")),
    ]
    assert len({manifest.digest, *(other.digest for other in changed)}) == 6


def test_parquet_restores_a_manifest(store: Store) -> None:
    manifest = build_manifest(fill(store, *FILES, *OTHERS, "ünï/日本.jpg"))
    assert_same(Manifest.from_parquet(manifest.to_parquet()), manifest)
    assert_same(pickle.loads(pickle.dumps(manifest)), manifest)
    selected = manifest.select(np.array([5, 0, 2]))
    assert_same(Manifest.from_parquet(selected.to_parquet()), selected)
    assert keys(selected) == [keys(manifest)[i] for i in (5, 0, 2)]


def test_the_parquet_file_can_be_read_by_other_programs(store: Store, tmp_path: Path) -> None:
    manifest = build_manifest(fill(store, *FILES))
    (tmp_path / "manifest.parquet").write_bytes(manifest.to_parquet())
    table = pq.read_table(tmp_path / "manifest.parquet")
    assert table.column_names == ["key", "label", "size_bytes", "etag"] and table["key"].to_pylist() == keys(manifest)


def test_a_damaged_manifest_is_refused(store: Store) -> None:
    written = build_manifest(fill(store, *FILES)).to_parquet()
    for data in (written[:-10], written[: len(written) // 2], b"", b"no parquet"):
        with pytest.raises(StorageError, match="manifest is damaged"):
            Manifest.from_parquet(data)


@pytest.mark.parametrize(
    "metadata",
    ["[" * 100_000, '{"classes": [], "label_sets": [[' + "9" * 30 + "]]}", '{"classes": [], "label_sets": 1}'],
)
def test_metadata_that_cannot_be_read_is_refused(metadata: str, store: Store) -> None:
    table = pq.read_table(pa.BufferReader(build_manifest(fill(store, *FILES)).to_parquet()))
    edited = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({b"raytrain.manifest": metadata}), edited)
    with pytest.raises(StorageError, match="manifest is damaged"):
        Manifest.from_parquet(edited.getvalue().to_pybytes())


def test_an_edited_manifest_is_refused(store: Store) -> None:
    table = pq.read_table(pa.BufferReader(build_manifest(fill(store, *FILES)).to_parquet()))
    edited = pa.BufferOutputStream()
    pq.write_table(table.set_column(1, "label", pa.array([2, 0, 0, 0, 1, 1], pa.int32())), edited)
    with pytest.raises(StorageError, match="changed after it was written"):
        Manifest.from_parquet(edited.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/readme.txt", "b.pdf"], r"no images below .*, but 1 table or description, 1 .pdf file; check"),
        (["1.jpg", "2.jpg", "3.jpg"], r"no class folders below .*, only 3 images.*/images/cat/"),
        (["cat/1.jpg", "cat/2.jpg", "9.jpg"], r"has one class only, 'cat', with 2 images"),
    ],
)
def test_a_folder_that_is_not_a_data_set_is_refused(store: Store, paths: list[str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        build_manifest(fill(store, *paths))


def test_a_missing_folder_is_an_error(store: Store) -> None:
    with pytest.raises(StorageError, match="There is no folder"):
        build_manifest(store)


def test_an_empty_prefix_is_an_error(s3_url: str) -> None:
    with pytest.raises(UsageError, match=f"no images below {s3_url}/none, nor other files"):
        build_manifest(open_store(f"{s3_url}/none"))


def test_a_file_name_that_is_not_utf_8_is_an_error(store: Store) -> None:
    fill(store, "dog/1.jpg", b"cat/caf\xe9.jpg".decode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=r"caf\\udce9.jpg' is not valid UTF-8"):
        build_manifest(store)


def test_test_images_take_the_labels_of_the_training_images(store: Store) -> None:
    manifest = build_manifest(fill(store, "owl/1.jpg", "cat/1.jpg"), classes=("cat", "dog", "owl"))
    assert manifest.classes == ("cat", "dog", "owl") and manifest.labels.tolist() == [0, 2]
    one_class = build_manifest(fill(open_store(f"{store.url}/owls"), "owl/1.jpg"), classes=("cat", "dog", "owl"))
    assert one_class.labels.tolist() == [2]


def test_test_images_of_unknown_classes_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match=r"2 classes that the training images lack: elk, emu \(those have cat, owl\)"):
        build_manifest(fill(store, "owl/1.jpg", "emu/1.jpg", "elk/1.jpg"), classes=("cat", "owl"))


def test_a_split_is_stratified_random_and_repeatable(store: Store) -> None:
    manifest = numbered(store, cat=100, dog=50, elk=7)
    train, test = hold_out(manifest, 0.1, seed=3)
    assert np.bincount(test.labels).tolist() == [10, 5, 1]
    assert sorted(keys(train) + keys(test)) == keys(manifest)
    assert keys(train) == sorted(keys(train)) and keys(test) == sorted(keys(test))
    assert train.classes == test.classes == manifest.classes
    again, other = hold_out(manifest, 0.1, seed=3)[1], hold_out(manifest, 0.1, seed=4)[1]
    assert again.digest == test.digest != other.digest
    assert keys(test)[:10] != keys(manifest)[:10]


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_a_split_has_each_class_on_both_sides_if_possible(store: Store, fraction: float) -> None:
    train, test = hold_out(numbered(store, cat=2, dog=40, elk=1), fraction, seed=0)
    assert min(np.bincount(train.labels, minlength=3)) >= 1
    assert min(np.bincount(test.labels, minlength=3)[:2]) >= 1 and 2 not in test.labels


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.floats(0.01, 0.99), st.integers(-5, 10**6))
def test_a_split_has_each_image_once(labels: list[int], fraction: float, seed: int) -> None:
    names = pa.array([f"{number:03d}.jpg" for number in range(len(labels))], pa.large_string())
    sizes = np.ones(len(labels), np.int64)
    manifest = Manifest(names, np.array(labels, np.int32), sizes, names, ("a", "b", "c", "d"), "folder")
    train, test = hold_out(manifest, fraction, seed)
    assert sorted(keys(train) + keys(test)) == keys(manifest)
    for label in set(labels):
        num_images, num_held_out = labels.count(label), int((test.labels == label).sum())
        assert num_held_out == 0 if num_images == 1 else 1 <= num_held_out < num_images
        assert abs(num_held_out - fraction * num_images) <= 1


@pytest.mark.not_quick
def test_a_manifest_is_written_without_pandas_whose_import_would_delay_a_start(store: Store) -> None:
    fill(store, *FILES)
    subprocess.run([sys.executable, "-c", WRITE, store.url], check=True)


def written(metadata: dict[str, object], **columns: object) -> bytes:
    about = {"url": "x", "classes": ["a"], "left_out": {}, "digest": "0", "labels_digest": "", **metadata}
    table = pa.table(columns).replace_schema_metadata({b"raytrain.manifest": json.dumps(about)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("bomb", ["equal keys", "equal etags", "rows", "one key", "sets"])
def test_a_manifest_of_some_kilobytes_that_would_take_gigabytes_is_refused(bomb: str) -> None:
    num_rows = {"rows": 4_000_000, "one key": 1, "sets": 1}.get(bomb, 10_000)
    texts = pa.array(["k" * 10_000] * num_rows if "equal" in bomb else ["k" * 10**8] if num_rows == 1 else [])
    nothing, zeros = pa.repeat("", num_rows), np.zeros(num_rows, np.int32)
    sets = {"classes": [f"{number}" for number in range(20_000)], "label_sets": [[]] * 20_000} if bomb == "sets" else {}
    data = written(
        sets,
        key=texts if bomb in ("equal keys", "one key") else nothing,
        label=zeros,
        size_bytes=zeros.astype(np.int64),
        etag=texts if bomb == "equal etags" else nothing,
    )
    assert len(data) < 1_000_000
    before = pa.total_allocated_bytes()
    with pytest.raises(StorageError, match=r"The manifest is damaged \(its .* bytes would take over .* MB of memory"):
        Manifest.from_parquet(data)
    assert pa.total_allocated_bytes() - before < 50_000_000


def test_columns_of_others_in_a_manifest_are_not_read(store: Store) -> None:
    manifest = numbered(store, cat=2, dog=1)
    table = pq.read_table(pa.BufferReader(manifest.to_parquet()))
    sink = pa.BufferOutputStream()
    pq.write_table(table.append_column("more", pa.array([["k" * 10**6]] * 3)), sink)
    assert Manifest.from_parquet(sink.getvalue().to_pybytes()).digest == manifest.digest
