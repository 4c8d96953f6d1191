"""Packed shards: Parquet files of encoded images, written whole, read whole, and kept for the blocks that come next."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrain.data.manifest import Manifest, Packing
from raytrain.data.permutation import permute
from raytrain.storage.base import Store

SHARD_BYTES = 1 << 20
"""Of images in a shard, about: large enough to be fetched at full speed, small enough to have many of them open."""

_KEPT_BYTES = 128 << 20
_METADATA = b"raytrain.shard"
_ORDER = 0x7061636B  # any number: the same images are always dealt out in the same way


class DamagedShard(ValueError):
    """A shard is not what was written; the text says so."""


def deal(images: Manifest, url: str) -> Manifest:
    """The same images dealt out at random over shards below ``url``, always in the same way, so that each shard is mixed.

    A shard's name tells what is in it, by a digest, so that one which is there need not be written again.
    """
    dealt = images.select(permute(np.arange(len(images)), len(images), key=_ORDER))
    starts = np.cumsum(dealt.sizes_bytes) - dealt.sizes_bytes
    _, shard = np.unique(starts // SHARD_BYTES, return_inverse=True)
    bounds = np.append(np.flatnonzero(np.diff(shard, prepend=-1)), len(images))
    shards = tuple(_name(number, dealt.select(np.arange(*bounds[number : number + 2]))) for number in range(len(bounds) - 1))
    row = np.arange(len(images)) - bounds[shard]
    return replace(dealt, url=url, packing=Packing(shards, shard.astype(np.int32), row.astype(np.int32)))


def shards_of(packed: Manifest) -> dict[str, Manifest]:
    """Each shard's path and the images that lie in it, in the order of its rows."""
    assert packed.packing is not None
    paths = packed.packing.shards
    bounds = np.searchsorted(packed.packing.shard, np.arange(len(paths) + 1))
    return {path: packed.select(np.arange(*bounds[number : number + 2])) for number, path in enumerate(paths)}


def to_shard(images: Manifest, contents: Sequence[bytes]) -> bytes:
    """A Parquet file of the columns key, label and image (the file's bytes), with the classes in its schema's metadata."""
    columns = {"key": images.keys, "label": images.labels, "image": pa.array(contents, pa.binary())}
    table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps({"classes": images.classes})})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def is_shard(data: bytes, images: Manifest) -> bool:
    """Whether ``data`` is the whole shard of ``images``: its checksums are right, and its keys, labels and sizes are theirs."""
    try:
        table = _parse(data, ["key", "label", "image"])
    except DamagedShard:
        return False
    sizes_bytes = pc.binary_length(table["image"])  # pyright: ignore[reportAttributeAccessIssue]
    columns = (table["key"].to_pylist(), table["label"].to_pylist(), sizes_bytes.to_pylist())
    return columns == (images.keys.to_pylist(), images.labels.tolist(), images.sizes_bytes.tolist())


def read_packed(store: Store, packing: Packing) -> list[bytes | Exception]:
    """Contents of images in the order of ``packing``; each shard is fetched once, or taken from those that are kept."""
    numbers = np.unique(packing.shard).tolist()
    shards = dict(zip(numbers, _kept.get_many(store, [packing.shards[number] for number in numbers]), strict=True))
    return [_image(shards[number], row) for number, row in zip(packing.shard.tolist(), packing.row.tolist(), strict=True)]


class _Kept:
    """The shards that this process has read last: as many as a block needs, and others as far as there is room."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], pa.Array] = {}  # the oldest first
        self._lock = threading.Lock()

    def get_many(self, store: Store, paths: Sequence[str]) -> list[pa.Array | Exception]:
        """The images of each shard, or why it cannot be read."""
        with self._lock:
            kept = {path: self._columns.get((store.url, path)) for path in paths}
        found: dict[str, pa.Array | Exception] = {path: column for path, column in kept.items() if column is not None}
        missing = [path for path in paths if path not in found]
        found |= {path: _column(data) for path, data in zip(missing, store.get_many(missing), strict=True)}
        self._keep({(store.url, path): column for path, column in found.items() if isinstance(column, pa.Array)})
        return [found[path] for path in paths]

    def _keep(self, newest: dict[tuple[str, str], pa.Array]) -> None:
        with self._lock:
            self._columns = {key: column for key, column in self._columns.items() if key not in newest} | newest
            over_bytes = sum(column.nbytes for column in self._columns.values()) - _KEPT_BYTES
            for key in list(self._columns)[: -len(newest) or None]:
                if over_bytes <= 0:
                    break
                over_bytes -= self._columns.pop(key).nbytes


_kept = _Kept()


def _column(data: bytes | Exception) -> pa.Array | Exception:
    if isinstance(data, Exception):
        return data
    try:
        return _parse(data, ["image"])["image"].chunk(0)
    except DamagedShard as error:
        return error


def _parse(data: bytes, columns: list[str]) -> pa.Table:
    try:
        table = pq.read_table(pa.BufferReader(data), columns=columns, page_checksum_verification=True, use_threads=False)
    except (pa.ArrowInvalid, OSError, KeyError):
        raise DamagedShard("its shard is damaged; pack the images again") from None
    return table.combine_chunks()


def _image(images: pa.Array | Exception, row: int) -> bytes | Exception:
    return images if isinstance(images, Exception) else images[row].as_py()


def _name(number: int, images: Manifest) -> str:
    content = hashlib.sha256("\0".join([images.digest, *images.etags.to_pylist()]).encode())
    return f"shards/{number:06d}-{content.hexdigest()[:16]}.parquet"
