"""Packing a data set of images: into shards that are read much faster than as many small objects."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import track

from raytrain.data.manifest import INDEX, Manifest, build_manifest
from raytrain.data.shards import deal, is_shard, shards_of, to_shard
from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import Store
from raytrain.storage.open import open_store

_SHARDS_AT_ONCE = 4  # each fetches its images with all of the store's threads


def pack(source: str, destination: str, console: Console | None = None) -> dict[str, Any]:
    """Copy labelled images into packed shards below ``destination``, which ``--data`` takes in their place.

    Each shard is read back after it is written. One that is there and whole is not written again, so that packing which was
    interrupted goes on; the index, without which nothing counts as packed, comes last.

    Args:
        source: s3://bucket/prefix or a folder, with class folders of images.
        destination: s3://bucket/prefix or a folder.
        console: where the progress bar goes; by default standard error.

    Returns:
        source, destination, num_images, num_classes, num_shards, num_bytes (of images), num_written (shards, this time) and
        digest (of keys, labels, sizes and places).

    Raises:
        UsageError: ``source`` is no data set of images, or packed already.
        StorageError: one of both cannot be used, an image changed meanwhile, or a shard is not what was written.
    """
    images_store, packed_store = open_store(source), open_store(destination)
    images = build_manifest(images_store)
    if images.packing is not None:
        raise UsageError(f"The images in {source} are packed already; give the folder that they were packed from.")
    if images_store.url == packed_store.url:
        raise UsageError(f"{source} cannot be packed into itself; give the shards a folder of their own.")
    packed_store.check_writable()
    packed = deal(images, packed_store.url)
    shards = shards_of(packed)
    written = _write(images_store, packed_store, shards, console or Console(stderr=True))
    packed_store.put(INDEX, packed.to_parquet())
    _check_whole(packed_store, packed, shards)
    return {
        "source": images.url,
        "destination": packed.url,
        "num_images": len(packed),
        "num_classes": len(packed.classes),
        "num_shards": len(shards),
        "num_bytes": int(packed.sizes_bytes.sum()),
        "num_written": written,
        "digest": packed.digest,
    }


def _write(images_store: Store, packed_store: Store, shards: dict[str, Manifest], console: Console) -> int:
    """Write the shards that are not there yet; how many those were."""
    there = {stored.path for stored in packed_store.list("shards")}

    def write(path: str) -> bool:
        if path in there and is_shard(packed_store.get(path), shards[path]):
            return False
        _write_shard(packed_store, path, to_shard(shards[path], _contents(images_store, shards[path])))
        return True

    pool = ThreadPoolExecutor(_SHARDS_AT_ONCE, thread_name_prefix="shards")
    try:
        return sum(track(pool.map(write, shards), f"Packing into {packed_store.url}", total=len(shards), console=console))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt ends it at once


def _write_shard(store: Store, path: str, data: bytes) -> None:
    store.put(path, data)
    if store.get(path) != data:
        raise StorageError(f"{store.url}/{path} is not what was written to it; run the command again.")


def _contents(store: Store, images: Manifest) -> Sequence[bytes]:
    keys: list[str] = images.keys.to_pylist()
    contents: list[bytes] = []
    for key, size_bytes, data in zip(keys, images.sizes_bytes, store.get_many(keys), strict=True):
        if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
            raise data
        if isinstance(data, FileNotFoundError) or len(data) != size_bytes:
            raise StorageError(f"{store.url}/{key} was changed or deleted since the images were listed; run the command again.")
        contents.append(data)
    return contents


def _check_whole(store: Store, packed: Manifest, shards: dict[str, Manifest]) -> None:
    """Raise StorageError unless the store now holds the packed images, by their index and the list of its shards."""
    missing = set(shards) - {stored.path for stored in store.list("shards")}
    if missing or build_manifest(store).digest != packed.digest:
        raise StorageError(f"{packed.url} lacks {len(missing):,} of {len(shards):,} shards, or its index; run the command again.")
