"""A packed data set that a stranger made is checked when it is opened."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, Packing, list_images
from raytrain.data.shards import encode_shard, shard_path
from raytrain.datasets.pack import pack
from raytrain.errors import StorageError
from raytrain.storage.open import open_store
from tests.helpers.small_runs import make_images

SHAPE = ImageShape(12, 12, 3)
GOOD = "shards/000000-0123456789abcdef.parquet"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    pack(str(make_images(tmp_path / "images", 9)), str(tmp_path / "packed"), console=Console(file=io.StringIO()))
    return tmp_path / "packed"


def rewrite(folder: Path, change: Callable[[Manifest, Packing], Manifest]) -> Manifest:
    """Write another index, with the digest that belongs to it."""
    manifest = build_manifest(open_store(str(folder)))
    assert manifest.packing is not None
    (folder / PACKED_INDEX).write_bytes(change(manifest, manifest.packing).to_parquet())
    return manifest


def with_packing(**changes: object) -> Callable[[Manifest, Packing], Manifest]:
    return lambda manifest, packing: replace(manifest, packing=replace(packing, **changes))


def with_labels(*labels: float) -> Callable[[Manifest, Packing], Manifest]:
    return lambda manifest, packing: replace(manifest, labels=np.array(labels))


INT = np.int32
STRANGE = {
    "path above the folder": with_packing(shards=("../images/red/000.png",)),
    "absolute path": with_packing(shards=("/etc/passwd",)),
    "path with a step up": with_packing(shards=("shards/../../x.parquet",)),
    "path that is no text": with_packing(shards=(7,)),
    "no shard": with_packing(shards=()),
    "shard below 0": with_packing(shard=np.full(9, -1, INT)),
    "shard out of range": with_packing(shard=np.full(9, 1, INT)),
    "shards out of order": with_packing(shards=(GOOD, GOOD.replace("0-", "1-")), shard=np.array([1] + [0] * 8, INT)),
    "row below 0": with_packing(row=np.array([-1, *range(8)], INT)),
    "row in floats": with_packing(row=np.linspace(0, 8, 9)),
    "label out of range": with_labels(0, 1, 2, 3, 0, 1, 2, 0, 1),
    "label below 0": with_labels(0, 1, 2, -1, 0, 1, 2, 0, 1),
    "label far below 0": with_labels(0, 1, 2, -7, 0, 1, 2, 0, 1),
    "label in floats": with_labels(0.5, 1, 2, 1, 0, 1, 2, 0, 1),
    "size below 0": lambda manifest, packing: replace(manifest, sizes_bytes=-manifest.sizes_bytes),
    "class twice": lambda manifest, packing: replace(manifest, classes=("red", "red", "blue")),
    "class that is no text": lambda manifest, packing: replace(manifest, classes=(1, 2, 3)),  # pyright: ignore
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_an_index_that_raytrain_does_not_write_is_refused(
    change: Callable[[Manifest, Packing], Manifest], packed: Path
) -> None:
    rewrite(packed, change)
    for opened in (build_manifest, list_images):
        with pytest.raises(
            StorageError, match=r"index of the packed images, .*packed.parquet, is damaged; delete it, and pack"
        ):
            opened(open_store(str(packed)))


def test_metadata_of_another_kind_are_refused(packed: Path) -> None:
    table = pq.read_table(packed / PACKED_INDEX)
    (key,) = table.schema.metadata
    for metadata in (b"[]", b"7", b"{", b"\xff", b'{"classes": 7}', json.dumps({"digest": None}).encode()):
        pq.write_table(table.replace_schema_metadata({key: metadata}), packed / PACKED_INDEX)
        with pytest.raises(StorageError, match="is damaged; delete it"):
            build_manifest(open_store(str(packed)))


def replace_shard(packed: Path, data: bytes) -> None:
    """Write another content of the only shard, with the name that belongs to it, and an index of that name."""
    path = shard_path(0, data)
    (packed / path).write_bytes(data)
    rewrite(packed, with_packing(shards=(path,)))


def encoded_table(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def reasons(packed: Path) -> set[str]:
    store = open_store(str(packed))
    manifest = build_manifest(store)
    _, bad = ImageReader(store, SHAPE).read(manifest)
    assert len(bad) == len(manifest) or len(bad) == 1
    return set(bad.values())


def test_a_row_that_the_shard_lacks_costs_its_image(packed: Path) -> None:
    rewrite(packed, with_packing(row=np.array([*range(8), 1_000_000], INT)))
    assert reasons(packed) == {"its shard is damaged; pack the images again"}


@pytest.mark.parametrize(
    "column",
    [pa.array([], pa.binary()), pa.array([7] * 9), pa.array(["text"] * 9), pa.array([None] * 9, pa.binary())],
    ids=["empty", "numbers", "text", "nulls"],
)
def test_a_shard_of_other_content_costs_its_images(column: pa.Array, packed: Path) -> None:
    table = pa.table({"key": pa.nulls(len(column)), "label": pa.nulls(len(column)), "image": column})
    replace_shard(packed, encoded_table(table))
    assert reasons(packed) == {"its shard is damaged; pack the images again"}


@pytest.mark.timeout(60)
def test_a_pipe_as_shard_is_an_error(packed: Path) -> None:
    (shard,) = (packed / "shards").iterdir()
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(StorageError, match=f"{shard.name} is not a file but a pipe or a device; remove it"):
        reasons(packed)


def test_a_shard_that_unpacks_to_far_more_than_its_size_costs_its_images(packed: Path) -> None:
    manifest = build_manifest(open_store(str(packed)))
    bomb = pa.table({"key": manifest.keys, "label": manifest.labels, "image": pa.array([bytes(50 << 20)] * 9)})
    data = encoded_table(bomb, compression="zstd", use_dictionary=True)
    assert len(data) < 1 << 20
    replace_shard(packed, data)
    assert reasons(packed) == {"its shard is damaged; pack the images again"}
    replace_shard(packed, encode_shard(manifest, [b"x"] * 9))
    assert reasons(packed) == {"the file is text, such as an error of a server or a path"}
