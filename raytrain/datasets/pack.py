"""`raytrain pack`: labelled images, from folders or archives, into packed shards, if asked for as smaller JPEGs."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from raytrain.data.blocks import string_array
from raytrain.data.images.decode import shrink
from raytrain.data.images.image_format import BadImage
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, Shrinking
from raytrain.data.shards import assign_shards, encode_shard, is_shard_of, packed_manifest, shard_path
from raytrain.datasets.sources import Labelling, labelled_source
from raytrain.errors import StorageError, UsageError
from raytrain.storage.folder import refuse_links_out
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

_NUM_THREADS = 4  # each fetches images with all of the store's threads
_NUM_SHRUNK_AT_ONCE = 64  # images
T = TypeVar("T")
R = TypeVar("R")
_ReadFiles = Callable[[Manifest], "list[bytes]"]  # of the images of a manifest, in its order


@dataclass(frozen=True)
class PackResult:
    """The result of :func:`pack`."""

    source: str
    destination: str
    num_images: int
    num_classes: int
    num_shards: int
    num_bytes: int  # of all images
    num_written: int  # shards written this time
    digest: str  # of keys, labels, sizes and shards (see :attr:`Manifest.digest`)


def pack(
    source: str,
    destination: str,
    console: Console | None = None,
    *,
    labels: Labelling | None = None,
    shrinking: Shrinking | None = None,
) -> PackResult:
    """Copy labelled images into packed shards below ``destination``, which ``--data`` accepts instead of ``source``.

    Each shard is read back after it is written, and its name has a checksum of its content, which whoever reads it
    compares. A shard that is already there and whole is not written again, so that interrupted packing can be resumed.
    The index is written last; without it, nothing counts as packed.

    Args:
        source: s3://bucket/prefix or a folder, with images or with Parquet files or WebDataset tars of images; or one
            such file, or a pattern with ``*`` (see :mod:`raytrain.datasets.archives`).
        destination: s3://bucket/prefix or a folder.
        console: shows the progress bar; by default standard error.
        labels: where the labels are; by default in ``metadata.csv`` or ``.jsonl`` beside the images, else the folders
            of the images are the labels.
        shrinking: what larger images become, in a temporary folder on this machine; by default they stay as they are.

    Raises:
        UsageError: ``source`` is not a data set of images, is packed already, or has links that lead out of it, or no
            image can be shrunk like this.
        StorageError: a store cannot be used, an image changed meanwhile, or a shard is not what was written.

    Example: ``pack("s3://photos/flowers", "s3://photos/flowers-packed", shrinking=Shrinking(256, 90))``.
    """
    if shrinking is not None and not (shrinking.shorter_side > 0 < shrinking.quality <= 100):
        raise UsageError(
            f"--shorter-side is {shrinking.shorter_side} and --quality {shrinking.quality}; the first must be at least "
            "1, the second 1 to 100."
        )
    console = console or Console(stderr=True)
    with labelled_source(source, labels or Labelling()) as (images_store, images), ExitStack() as opened:
        if images.packing is not None:
            raise UsageError(f"The images in {source} are packed already; give the folder that they were packed from.")
        packed_store = open_store(destination)
        if images_store.url == packed_store.url:
            raise UsageError(f"{source} cannot be packed into itself; give another folder for the shards.")
        refuse_links_out(images_store, images.keys.to_pylist())
        packed_store.check_writable()

        # Shrunk images are files on this machine; others are fetched when their shard is written.
        read = partial(_fetch_unchanged, images_store)
        if shrinking is not None:
            read, images = _shrunk(read, images, shrinking, opened.enter_context(TemporaryFolder()), console)
        shards = assign_shards(images)
        paths, num_written = _write_missing(read, packed_store, shards, console)
        packed = packed_manifest(images, shards, paths, packed_store.url)

    # The index comes last, and must be found with all of its shards.
    packed_store.put(PACKED_INDEX, packed.to_parquet())
    missing = set(paths) - {stored.path for stored in packed_store.list("shards")}
    if missing or build_manifest(packed_store).digest != packed.digest:
        raise StorageError(
            f"{packed.url} lacks {len(missing):,} of {len(shards):,} shards, or its index; run the command again."
        )
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


def _shrunk(
    read: _ReadFiles, images: Manifest, shrinking: Shrinking, folder: Path, console: Console
) -> tuple[_ReadFiles, Manifest]:
    """Write smaller files of the images into ``folder``; return how to read these, and the images with their sizes."""

    def file(key: str) -> Path:
        return folder / hashlib.sha256(key.encode()).hexdigest()  # a key may lead out of the folder

    def write(start: int) -> list[int]:
        part = images.select(np.arange(start, min(start + _NUM_SHRUNK_AT_ONCE, len(images))))
        return [
            file(key).write_bytes(_shrink_file(data, shrinking))
            for key, data in zip(part.keys.to_pylist(), read(part), strict=True)
        ]

    # Shards are cut by the sizes of the files, so that all of these are made first. The options are in the tags, so
    # that other options make other shards.
    starts = range(0, len(images), _NUM_SHRUNK_AT_ONCE)
    sizes = [size for part in _in_threads(write, starts, "Shrinking images", console) for size in part]
    etags = string_array([f"{etag}-{shrinking.shorter_side}-{shrinking.quality}" for etag in images.etags.to_pylist()])
    shrunk = replace(images, sizes_bytes=np.array(sizes), etags=etags, shrinking=shrinking)
    return lambda part: [file(key).read_bytes() for key in part.keys.to_pylist()], shrunk


def _shrink_file(data: bytes, shrinking: Shrinking) -> bytes:
    """Return the file of a smaller image; ``data`` if that would not take fewer bytes, or cannot be read."""
    from PIL import Image

    try:
        pixels = shrink(data, shrinking.shorter_side)
    except BadImage:  # whoever reads it says so
        return data
    if pixels is None:
        return data
    written = io.BytesIO()
    Image.fromarray(pixels.squeeze(axis=2) if pixels.shape[2] == 1 else pixels).save(
        written, "JPEG", quality=shrinking.quality
    )
    return min(written.getvalue(), data, key=len)


def _write_missing(
    read: _ReadFiles, packed_store: Store, shards: Sequence[Manifest], console: Console
) -> tuple[list[str], int]:
    """Write the shards that are missing or damaged; return the paths of all, and the number of those written."""
    existing: dict[str, list[str]] = {}  # by the part of a path that does not depend on the content
    for stored in packed_store.list("shards"):
        existing.setdefault(stored.path.partition("-")[0], []).append(stored.path)

    def write(number: int) -> tuple[str, bool]:
        for path in existing.get(shard_path(number, b"").partition("-")[0], []):
            if is_shard_of(shards[number], path, packed_store.get(path)):
                return path, False
        data = encode_shard(shards[number], read(shards[number]))
        path = shard_path(number, data)
        packed_store.put(path, data)
        if packed_store.get(path) != data:
            raise StorageError(f"{packed_store.url}/{path} is not what was written to it; run the command again.")
        return path, True

    written = _in_threads(write, range(len(shards)), f"Packing into {packed_store.url}", console)
    return [path for path, _ in written], sum(is_new for _, is_new in written)


def _in_threads(function: Callable[[T], R], items: Sequence[T], description: str, console: Console) -> list[R]:
    """Call ``function`` with each item, a few at a time, beside a progress bar; return the results in order."""
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pack")
    try:
        return list(
            track(pool.map(function, items), description, total=len(items), console=console, disable=console.is_jupyter)
        )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C ends it at once


def _fetch_unchanged(store: Store, images: Manifest) -> list[bytes]:
    """Return the files of ``images``, in their order. Raise StorageError if one is not what was listed."""
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
