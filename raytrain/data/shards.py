"""Packed shards, Parquet files of encoded images, written whole, read whole, and cached for the blocks that follow.

A request for each of a million small files costs more than their bytes. ``raytrain pack`` mixes images into shards of
about 1 MiB, which are fetched as a whole. The order of an epoch keeps to few shards at a time (see
:class:`raytrain.data.plan.permutation.ShardShuffle`), so that most blocks find theirs in this process's cache.

The manifest has the names of the shards, and the name of a shard has a checksum of its content. So one that is damaged,
or comes from another pack, is seen when it is read.
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

from raytrain.data.labels.manifest import Manifest, Packing
from raytrain.data.plan.permutation import permute
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
    """A shard does not hold the bytes that were written; the message says what to do."""


def _in_packing_order(images: Manifest) -> Manifest:
    """Return the images in the fixed random order in which shards hold them, one shard after the other."""
    return images.select(permute(np.arange(len(images)), len(images), key=_PACKING_KEY))


def assign_shards(images: Manifest) -> list[Manifest]:
    """Shuffle images in a fixed way and divide them into shards; return those of each, in the order of its rows."""
    packed = _in_packing_order(images)
    # Lay the bytes of all images one after the other, and cut them every SHARD_BYTES. An image belongs to the piece in
    # which its first byte lies, so a large one may leave pieces without any.
    starts = np.cumsum(packed.sizes_bytes) - packed.sizes_bytes
    piece_of_image = starts // SHARD_BYTES
    first_images = np.flatnonzero(np.diff(piece_of_image, prepend=-1))
    ends = np.append(first_images, len(images))[1:]
    return [packed.select(np.arange(start, end)) for start, end in zip(first_images, ends, strict=True)]


def packed_manifest(images: Manifest, shards: Sequence[Manifest], paths: Sequence[str], url: str) -> Manifest:
    """Return the manifest of ``images`` packed into ``shards`` by :func:`assign_shards`, at ``paths`` below ``url``."""
    lengths = [len(shard) for shard in shards]
    row = np.concatenate([np.arange(length) for length in lengths])
    shard = np.repeat(np.arange(len(shards)), lengths)
    return replace(
        _in_packing_order(images),
        url=url,
        packing=Packing(tuple(paths), shard.astype(np.int32), row.astype(np.int32)),
    )


def shard_path(number: int, data: bytes) -> str:
    """Return the path of shard ``number``, which contains a checksum of its content ``data``."""
    return f"shards/{number:06d}-{_checksum(data)}.parquet"


def _checksum(data: bytes) -> str:
    """Return the checksum of a shard that its path contains: 64 bits of SHA-256, as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def encode_shard(images: Manifest, contents: Sequence[bytes]) -> bytes:
    """Encode a Parquet file with the columns key, label and image (bytes); its schema metadata has the classes.

    They also have a digest of what was packed, so that packing again finds out whether that is still the same.
    """
    columns = {"key": images.keys, "label": images.labels, "image": pa.array(contents, pa.binary())}
    table = pa.table(columns).replace_schema_metadata({_METADATA: _metadata(images)})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    return sink.getvalue().to_pybytes()


def _metadata(images: Manifest) -> bytes:
    """Return what a shard of ``images`` says of itself, besides their keys, labels and contents."""
    digest = hashlib.sha256("\0".join([images.digest, *images.etags.to_pylist()]).encode())
    return json.dumps({"classes": images.classes, "images": digest.hexdigest()}).encode()


def is_shard_of(images: Manifest, path: str, data: bytes) -> bool:
    """Return True if ``data`` at ``path`` is undamaged and, by its metadata, the shard of exactly these ``images``."""
    try:
        table = _parse(path, data, ["key", "label", "image"])
    except DamagedShard:
        return False
    if (table.schema.metadata or {}).get(_METADATA) != _metadata(images):
        return False
    sizes_bytes = pc.binary_length(table["image"])  # pyright: ignore[reportAttributeAccessIssue]
    columns = (table["key"].to_pylist(), table["label"].to_pylist(), sizes_bytes.to_pylist())
    return columns == (images.keys.to_pylist(), images.labels.tolist(), images.sizes_bytes.tolist())


def each_packed(store: Store, packing: Packing) -> Iterator[tuple[int, bytes | Exception]]:
    """Yield the index in ``packing`` of each image, and its content or the exception of reading it, shard by shard.

    Shards come as they arrive, cached ones first.
    """
    # The shards that these images need, each once; an image has the index of its shard among them.
    numbers, shard_of_image = np.unique(packing.shard, return_inverse=True)
    for shard, column in shard_cache.get_each(store, [packing.shards[number] for number in numbers]):
        for index in np.flatnonzero(shard_of_image == shard).tolist():
            row = int(packing.row[index])
            if isinstance(column, Exception):
                yield index, column
            else:
                yield index, column[row].as_py() if row < len(column) else DamagedShard(_DAMAGED)


class ShardCache:
    """The images of the shards that this process read last, up to ``max_bytes``, or as many as a block needs."""

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self._max_bytes = max_bytes
        # By URL of the store and path, the least recently used first.
        self._columns: dict[tuple[str, str], pa.Array] = {}
        self._lock = threading.Lock()

    def get_each(self, store: Store, paths: Sequence[str]) -> Iterator[tuple[int, pa.Array | Exception]]:
        """Yield the index of each shard in ``paths``, and its images or why it cannot be read; cached shards first."""
        with self._lock:
            cached = {index: self._columns.get((store.url, path)) for index, path in enumerate(paths)}
        used = {index: column for index, column in cached.items() if column is not None}
        yield from used.items()

        # Fetch the others. Only whole shards are kept: one that could not be fetched, or is damaged, may be better the
        # next time.
        missing = [index for index in cached if index not in used]
        for position, data in fetch_each(store.get, [paths[index] for index in missing]):
            index = missing[position]
            column: pa.Array | Exception = data
            if isinstance(data, bytes):
                try:
                    column = used[index] = _parse(paths[index], data, ["image"])["image"].chunk(0)
                except DamagedShard as error:
                    column = error
            yield index, column

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


def _parse(path: str, data: bytes, columns: list[str]) -> pa.Table:
    """Return some columns of a shard, ``image`` among them, in one chunk each.

    Raises DamagedShard if ``data`` is not what was written to ``path``, or no shard that raytrain writes.
    """
    if not path.endswith(f"-{_checksum(data)}.parquet"):
        raise DamagedShard(_DAMAGED)
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
