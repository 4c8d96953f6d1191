"""Packed shards, Parquet files of encoded images, written whole, read whole, and cached for the blocks that follow.

A request for each of a million small files costs more than their bytes. ``raytrain pack`` mixes images into shards of
about 1 MiB, which are fetched as a whole. The order of an epoch keeps to few shards at a time (see
:class:`raytrain.data.plan.permutation.ShardShuffle`), so that most blocks find theirs in this process's cache.
"""

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
from raytrain.storage.retries_and_hedges import fetch_each
from raytrain.storage.store import Store

SHARD_BYTES = 1 << 20
"""Approximate bytes of images in a shard: large enough for full speed, small enough to keep many in memory."""

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
    # A shard ends with the image in which its bytes do: bounds are the first image of each shard, and the end.
    starts = np.cumsum(packed.sizes_bytes) - packed.sizes_bytes
    _, shard = np.unique(starts // SHARD_BYTES, return_inverse=True)
    bounds = np.append(np.flatnonzero(np.diff(shard, prepend=-1)), len(images))
    shards: dict[str, Manifest] = {}
    for number in range(len(bounds) - 1):
        members = packed.select(np.arange(*bounds[number : number + 2]))
        content = hashlib.sha256("\0".join([members.digest, *members.etags.to_pylist()]).encode())
        shards[f"shards/{number:06d}-{content.hexdigest()[:16]}.parquet"] = members
    row = np.arange(len(images)) - bounds[shard]
    packing = Packing(tuple(shards), shard.astype(np.int32), row.astype(np.int32))
    return replace(packed, url=url, packing=packing), shards


def encode_shard(images: Manifest, contents: Sequence[bytes]) -> bytes:
    """Encode a Parquet file with the columns key, label and image (bytes); its schema metadata has the classes."""
    columns = {"key": images.keys, "label": images.labels, "image": pa.array(contents, pa.binary())}
    table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps({"classes": images.classes})})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    return sink.getvalue().to_pybytes()


def is_shard_of(images: Manifest, data: bytes) -> bool:
    """Return whether ``data`` is the whole shard of ``images``: checksums, keys, labels and sizes are right."""
    try:
        table = _parse(data, ["key", "label", "image"])
    except DamagedShard:
        return False
    sizes_bytes = pc.binary_length(table["image"])  # pyright: ignore[reportAttributeAccessIssue]
    columns = (table["key"].to_pylist(), table["label"].to_pylist(), sizes_bytes.to_pylist())
    return columns == (images.keys.to_pylist(), images.labels.tolist(), images.sizes_bytes.tolist())


def each_packed(store: Store, packing: Packing) -> Iterator[tuple[int, bytes | Exception]]:
    """Yield index in ``packing`` and content of each image, shard by shard, each of which is fetched once or cached."""
    numbers, which = np.unique(packing.shard, return_inverse=True)
    for arrived, column in shard_cache.get_each(store, [packing.shards[number] for number in numbers]):
        for index in np.flatnonzero(which == arrived).tolist():
            row = int(packing.row[index])
            if isinstance(column, Exception):
                yield index, column
            else:
                yield index, column[row].as_py() if row < len(column) else DamagedShard(_DAMAGED)


class ShardCache:
    """The shards that this process read last: those that a block needs, and others up to ``max_bytes``."""

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self._max_bytes = max_bytes
        self._columns: dict[tuple[str, str], pa.Array] = {}  # the least recently used first
        self._lock = threading.Lock()

    def get_each(self, store: Store, paths: Sequence[str]) -> Iterator[tuple[int, pa.Array | Exception]]:
        """Yield the index of each shard in ``paths``, and its images or why it cannot be read."""
        with self._lock:
            cached = {index: self._columns.get((store.url, path)) for index, path in enumerate(paths)}
        used = {index: column for index, column in cached.items() if column is not None}
        yield from used.items()

        # Only whole shards are kept: one that could not be fetched, or is damaged, may be better the next time.
        missing = [index for index in cached if index not in used]
        for arrived, data in fetch_each(store.get, [paths[index] for index in missing]):
            column: pa.Array | Exception = data
            if isinstance(data, bytes):
                try:
                    column = used[missing[arrived]] = _parse(data, ["image"])["image"].chunk(0)
                except DamagedShard as error:
                    column = error
            yield missing[arrived], column

        # What was used now is the newest. The least recently used shards of the others go if the cache is too large.
        newest = {(store.url, paths[index]): column for index, column in used.items()}
        with self._lock:
            self._columns = {key: column for key, column in self._columns.items() if key not in newest} | newest
            excess_bytes = sum(column.nbytes for column in self._columns.values()) - self._max_bytes
            for key in list(self._columns)[: -len(newest) or None]:
                if excess_bytes <= 0:
                    break
                excess_bytes -= self._columns.pop(key).nbytes


shard_cache = ShardCache()


def _parse(data: bytes, columns: list[str]) -> pa.Table:
    """Return these columns of a shard, in one chunk. Raise DamagedShard if it is none that raytrain has written."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        # A compressed file might unpack to much more than its size; raytrain writes none.
        for group in range(file.metadata.num_row_groups):
            for number in range(file.metadata.num_columns):
                column = file.metadata.row_group(group).column(number)
                if column.compression != "UNCOMPRESSED" or column.has_dictionary_page:
                    raise DamagedShard(_DAMAGED)
        table = file.read(columns, use_threads=False).select(columns).combine_chunks()
    except (pa.ArrowInvalid, OSError, KeyError):
        raise DamagedShard(_DAMAGED) from None
    image = table.schema.field("image")
    if image.type != pa.binary() or table["image"].null_count or not len(table):
        raise DamagedShard(_DAMAGED)
    return table
