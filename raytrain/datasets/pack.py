"""Pack a data set of images into shards, which are read much faster than many small objects."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, build_manifest
from raytrain.data.shards import assign_shards, encode_shard, images_by_shard, is_shard_of
from raytrain.datasets.labelled_source import Labelling, labelled_source
from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import Store
from raytrain.storage.local import refuse_links_out
from raytrain.storage.open import open_store

_NUM_CONCURRENT_SHARDS = 4  # each fetches its images with all of the store's threads


@dataclass(frozen=True)
class PackResult:
    """What :func:`pack` has done."""

    source: str
    destination: str
    num_images: int
    num_classes: int
    num_shards: int
    num_bytes: int
    """Of all images."""
    num_written: int
    """Shards written this time."""
    digest: str
    """Of keys, labels, sizes and shards (see :attr:`Manifest.digest`)."""


def pack(
    source: str, destination: str, console: Console | None = None, *, labels: Labelling | None = None
) -> PackResult:
    """Copy labelled images into packed shards below ``destination``, which ``--data`` accepts instead of ``source``.

    Each shard is read back after it is written. A shard that is already there and whole is not written again, so that
    interrupted packing can be resumed. The index is written last; without it, nothing counts as packed.

    Args:
        source: s3://bucket/prefix or a folder, with images or with Parquet files or WebDataset tars of images; or one
            such file, or a pattern with ``*`` (see :mod:`raytrain.datasets.archives`).
        destination: s3://bucket/prefix or a folder.
        console: shows the progress bar; by default standard error.
        labels: where the labels are; by default in ``metadata.csv`` or ``.jsonl`` beside the images, else the folders
            of the images are the labels.

    Raises:
        UsageError: ``source`` is not a data set of images, is packed already, or has links that lead out of it.
        StorageError: a store cannot be used, an image changed meanwhile, or a shard is not what was written.
    """
    with labelled_source(source, labels or Labelling()) as (images_store, images):
        if images.packing is not None:
            raise UsageError(f"The images in {source} are packed already; give the folder that they were packed from.")
        packed_store = open_store(destination)
        if images_store.url == packed_store.url:
            raise UsageError(f"{source} cannot be packed into itself; give another folder for the shards.")
        refuse_links_out(images_store, images.keys.to_pylist())
        packed_store.check_writable()
        packed = assign_shards(images, packed_store.url)
        shards = images_by_shard(packed)
        num_written = _write_missing(images_store, packed_store, shards, console or Console(stderr=True))
    packed_store.put(PACKED_INDEX, packed.to_parquet())
    _check_complete(packed_store, packed, shards)
    return PackResult(
        source=source,
        destination=packed.url,
        num_images=len(packed),
        num_classes=len(packed.classes),
        num_shards=len(shards),
        num_bytes=int(packed.sizes_bytes.sum()),
        num_written=num_written,
        digest=packed.digest,
    )


def _write_missing(images_store: Store, packed_store: Store, shards: dict[str, Manifest], console: Console) -> int:
    """Write the shards that are missing or damaged; returns their number."""
    existing = {stored.path for stored in packed_store.list("shards")}

    def write(path: str) -> bool:
        if path in existing and is_shard_of(shards[path], packed_store.get(path)):
            return False
        _write_shard(packed_store, path, encode_shard(shards[path], _contents(images_store, shards[path])))
        return True

    description = f"Packing into {packed_store.url}"
    pool = ThreadPoolExecutor(_NUM_CONCURRENT_SHARDS, thread_name_prefix="shards")
    try:
        return sum(track(pool.map(write, shards), description, total=len(shards), console=console))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C ends it at once


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
            raise StorageError(
                f"{store.url}/{key} was changed or deleted since the images were listed; run the command again."
            )
        contents.append(data)
    return contents


def _check_complete(store: Store, packed: Manifest, shards: dict[str, Manifest]) -> None:
    """Raise StorageError unless the store now has the index of the packed images and lists all of its shards."""
    missing = set(shards) - {stored.path for stored in store.list("shards")}
    if missing or build_manifest(store).digest != packed.digest:
        raise StorageError(
            f"{packed.url} lacks {len(missing):,} of {len(shards):,} shards, or its index; run the command again."
        )
