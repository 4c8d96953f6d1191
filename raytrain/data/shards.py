"""Packed shards: Parquet files of encoded images, written whole, read whole, and cached for the blocks that follow."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.permutation import Packing, permute
from raytrain.storage.store import Store

SHARD_BYTES = 1 << 20
"""Approximate bytes of images in a shard: large enough for full speed, small enough to keep many in memory."""

_CACHE_BYTES = 128 << 20
_METADATA = b"raytrain.shard"
_DAMAGED = "its shard is damaged; pack the images again"
_PACKING_KEY = 0x7061636B  # an arbitrary constant: the same images are always packed in the same order

if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
    # Arrow's own gives free memory back at once: for each shard the system would clear two megabytes anew.
    pa.set_memory_pool(pa.system_memory_pool())


class DamagedShard(ValueError):
    """A shard does not hold what was written; the message says so."""


def assign_shards(images: Manifest, url: str) -> tuple[Manifest, dict[str, Manifest]]:
    """Distribute images over shards below ``url``, mixed, always alike; a shard's name has a digest of its images.

    Returns all of them, and each shard's path and its images, in the order of its rows.
    """
    packed = images.select(permute(np.arange(len(images)), len(images), key=_PACKING_KEY))
    starts = np.cumsum(packed.sizes_bytes) - packed.sizes_bytes
    _, shard = np.unique(starts // SHARD_BYTES, return_inverse=True)
    bounds = np.append(np.flatnonzero(np.diff(shard, prepend=-1)), len(images))
    members = (packed.select(np.arange(*bounds[number : number + 2])) for number in range(len(bounds) - 1))
    shards = {_shard_path(number, each): each for number, each in enumerate(members)}
    row = np.arange(len(images)) - bounds[shard]
    packing = Packing(tuple(shards), shard.astype(np.int32), row.astype(np.int32))
    return replace(packed, url=url, packing=packing), shards


def encode_shard(images: Manifest, contents: Sequence[bytes]) -> bytes:
    """A Parquet file with the columns key, label and image (the file's bytes); its schema metadata has the classes."""
    columns = {"key": images.keys, "label": images.labels, "image": pa.array(contents, pa.binary())}
    table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps({"classes": images.classes})})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    return sink.getvalue().to_pybytes()


def is_shard_of(images: Manifest, data: bytes) -> bool:
    """Whether ``data`` is the whole shard of ``images``: checksums, keys, labels and sizes are right."""
    try:
        table = _parse(data, ["key", "label", "image"])
    except DamagedShard:
        return False
    sizes_bytes = pc.binary_length(table["image"])  # pyright: ignore[reportAttributeAccessIssue]
    columns = (table["key"].to_pylist(), table["label"].to_pylist(), sizes_bytes.to_pylist())
    return columns == (images.keys.to_pylist(), images.labels.tolist(), images.sizes_bytes.tolist())


def each_packed(store: Store, packing: Packing) -> Iterator[tuple[int, bytes | Exception]]:
    """Index in ``packing`` and content of each image, shard by shard, each fetched once or cached."""
    numbers, which = np.unique(packing.shard, return_inverse=True)
    for arrived, column in _cache.get_each(store, [packing.shards[number] for number in numbers]):
        for index in np.flatnonzero(which == arrived).tolist():
            yield index, _image(column, int(packing.row[index]))


class _ShardCache:
    """The shards that this process read last: those that a block needs, and others up to ``_CACHE_BYTES``."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], pa.Array] = {}  # the least recently used first
        self._lock = threading.Lock()

    def get_each(self, store: Store, paths: Sequence[str]) -> Iterator[tuple[int, pa.Array | Exception]]:
        """The index of each shard in ``paths``, and its images or why it cannot be read."""
        with self._lock:
            columns = {index: self._columns.get((store.url, path)) for index, path in enumerate(paths)}
        found = {index: column for index, column in columns.items() if column is not None}
        yield from found.items()
        missing = [index for index in columns if index not in found]
        for arrived, data in store.get_each([paths[index] for index in missing]):
            column = _image_column(data)
            if isinstance(column, pa.Array):
                found[missing[arrived]] = column
            yield missing[arrived], column
        self._put({(store.url, paths[index]): column for index, column in found.items()})

    def _put(self, newest: dict[tuple[str, str], pa.Array]) -> None:
        """Add or renew shards, and drop the least recently used ones of the others if the cache is too large."""
        with self._lock:
            self._columns = {key: column for key, column in self._columns.items() if key not in newest} | newest
            excess_bytes = sum(column.nbytes for column in self._columns.values()) - _CACHE_BYTES
            for key in list(self._columns)[: -len(newest) or None]:
                if excess_bytes <= 0:
                    break
                excess_bytes -= self._columns.pop(key).nbytes


_cache = _ShardCache()


def _image_column(data: bytes | Exception) -> pa.Array | Exception:
    if isinstance(data, Exception):
        return data
    try:
        return _parse(data, ["image"])["image"].chunk(0)
    except DamagedShard as error:
        return error


def _parse(data: bytes, columns: list[str]) -> pa.Table:
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check_uncompressed(file.metadata)
        table = file.read(columns, use_threads=False).select(columns).combine_chunks()
    except (pa.ArrowInvalid, OSError, KeyError):
        raise DamagedShard(_DAMAGED) from None
    image = table.schema.field("image")
    if image.type != pa.binary() or table["image"].null_count or not len(table):
        raise DamagedShard(_DAMAGED)
    return table


def _check_uncompressed(metadata: pq.FileMetaData) -> None:
    """Raise ArrowInvalid if the file may unpack to much more than its size, as none that raytrain wrote does."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            if column.compression != "UNCOMPRESSED" or column.has_dictionary_page:
                raise pa.ArrowInvalid(f"{column.path_in_schema} is compressed")


def _image(images: pa.Array | Exception, row: int) -> bytes | Exception:
    if isinstance(images, Exception):
        return images
    return images[row].as_py() if row < len(images) else DamagedShard(_DAMAGED)


def _shard_path(number: int, images: Manifest) -> str:
    content = hashlib.sha256("\0".join([images.digest, *images.etags.to_pylist()]).encode())
    return f"shards/{number:06d}-{content.hexdigest()[:16]}.parquet"
