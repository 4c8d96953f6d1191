"""`raytrain pack`: labelled images, from folders, archives or a Ray dataset, into packed shards, perhaps smaller."""

from __future__ import annotations

import hashlib
import io
import os
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

from raytrain.config.data import check_label_pattern
from raytrain.config.option_values import Location
from raytrain.data.blocks import string_array
from raytrain.data.images.decode import shrink
from raytrain.data.images.image_format import BadImage
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.label_columns import LabelColumns
from raytrain.data.labels.listing import SUFFIXES
from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, Shrinking
from raytrain.data.shards import assign_shards, encode_shard, is_shard_of, packed_manifest, shard_path
from raytrain.datasets.ray_dataset import RAY_DATASET, Rows, is_ray_dataset
from raytrain.datasets.sources import Labelling, labelled_source
from raytrain.errors import StorageError, UsageError
from raytrain.storage.folder import refuse_links_out
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

_NUM_THREADS = 4  # few, because each uses all request threads of the store
_NUM_SHRUNK_AT_ONCE = 64  # images
_QUALITY = 90  # of the JPEGs of images that are made smaller
T = TypeVar("T")
R = TypeVar("R")
_ReadFiles = Callable[[Manifest], "list[bytes]"]
"""Returns the files of the images of a manifest, in its order."""


@dataclass(frozen=True)
class PackResult:
    """The result of :func:`pack`.

    Example: ``raytrain.pack("photos", "photos-packed").num_shards``
    """

    source: str
    destination: str
    num_images: int
    num_classes: int
    num_shards: int
    num_bytes: int  # of the files of all images
    num_written: int  # shards written this time
    digest: str  # of keys, labels, sizes and shards (see :attr:`Manifest.digest`)


def pack(
    source: Location | Rows,
    destination: Location,
    *,
    labels: Location | None = None,
    key_column: str | None = None,
    label_column: str | Sequence[str] = (),
    label_separator: str | None = None,
    label_pattern: str | None = None,
    split: str | None = None,
    max_bad_fraction: float = 0.01,
    image_suffix: str | None = None,
    shorter_side: int | None = None,
    quality: int | None = None,
    console: Console | None = None,
) -> PackResult:
    """Copy labelled images into packed shards below ``destination``, which ``--data`` accepts instead of ``source``.

    Each shard is read back after it is written. Its name has a checksum of its content, which a run compares with what
    it reads. A shard that is already there and whole is not written again, so that interrupted packing can be resumed.
    The index is written last; without it, nothing counts as packed.

    Args:
        source: a folder or a URL (s3://…, gs://…, az://…) with images, or with Parquet files or WebDataset tars of
            images; or one such file, or a pattern with ``*``. Or a ``ray.data.Dataset``, whose rows have an image as
            the bytes of a file or as a uint8 array (H, W, C), and a label, a string or an integer.
        destination: a folder or a URL.
        labels: a label file; by default ``metadata.csv``, ``.jsonl`` or ``.parquet`` beside the images, else their
            folders are the labels.
        key_column: column with the path of each image; by default ``key``, ``path``, ``file_name``, ``filename``,
            ``file`` or ``image``. Without one, the key of a row of a Ray dataset is a digest of its image and label.
        label_column: column with the class; by default ``label``, ``class``, ``target`` or ``category``. Several are
            one column for each class, which says with 0 or 1 whether an image has it.
        label_separator: separates the classes of an image that may have several, as in ``cat|dog``.
        label_pattern: a regular expression whose group ``label`` is the class in the name of a file.
        split: the value of the column ``split`` whose images are packed.
        max_bad_fraction: fraction of the rows of ``labels`` that may lack an image.
        image_suffix: which image of a WebDataset sample with several is packed, such as ``png``; by default the JPEG.
        shorter_side: larger images become JPEGs whose shorter side has this many pixels; by default they stay as they
            are. The smaller files lie in a temporary folder of this machine meanwhile.
        quality: the JPEG quality of images that ``shorter_side`` makes smaller, 1 to 100; by default 90.
        console: shows the progress bar; by default standard error.

    Raises:
        UsageError: ``source`` is not a data set of images, is packed already, or has links that lead out of it;
            ``destination`` has other images; or an option has a value that it cannot have.
        StorageError: a store cannot be used, an image changed meanwhile, or a shard is not what was written.

    Example::

        raytrain.pack("s3://photos/flowers", "s3://photos/flowers-packed", shorter_side=256)
        dataset = ray.data.read_images("s3://photos/birds", include_paths=True).add_column("label", species)
        raytrain.pack(dataset, "s3://photos/birds-packed")
    """
    # Check the options before anything is listed.
    if quality is not None and shorter_side is None:
        raise UsageError(
            f"--quality {quality} is for images that --shorter-side makes smaller; give --shorter-side, too, or leave "
            "--quality out."
        )
    quality = _QUALITY if quality is None else quality
    if shorter_side is not None and (shorter_side < 1 or not 1 <= quality <= 100):
        raise UsageError(
            f"--shorter-side is {shorter_side} and --quality {quality}; the first must be at least 1, the second 1 to "
            "100."
        )
    if not 0 <= max_bad_fraction <= 1:
        raise UsageError(f"--max-bad-fraction is {max_bad_fraction:g}; it must be at least 0 and at most 1.")
    if label_pattern is not None:
        check_label_pattern(label_pattern)
    if label_pattern is not None and labels is not None:
        raise UsageError("--label-pattern and --labels both say the classes of the images; give one of them.")
    source_name = _name_of_source(source)
    label_columns = (label_column,) if isinstance(label_column, str) else tuple(label_column)
    labelling = Labelling(
        file=None if labels is None else os.fspath(labels),
        columns=LabelColumns(key=key_column, label=label_columns, separator=label_separator),
        pattern=label_pattern,
        split=split,
        max_bad_fraction=max_bad_fraction,
        image_suffix=image_suffix,
    )

    # The source must not be packed already, and the destination must not have other images.
    console = console or Console(stderr=True)
    packed_store = open_store(os.fspath(destination))
    location_or_rows = os.fspath(source) if isinstance(source, os.PathLike) else source
    with labelled_source(location_or_rows, labelling) as (images_store, images), ExitStack() as opened:
        if images.packing is not None:
            raise UsageError(
                f"The images in {source_name} are packed already; give the folder that they were packed from."
            )
        if images_store.url == packed_store.url:
            raise UsageError(f"{source_name} cannot be packed into itself; give another folder for the shards.")
        refuse_links_out(images_store, images.keys.to_pylist())
        packed_store.check_writable()
        _refuse_other_images(packed_store)

        # With a shorter side, all images are first written to this machine. Otherwise, they are fetched shard by shard.
        read = partial(_fetch_unchanged, images_store)
        if shorter_side is not None:
            shrinking = Shrinking(shorter_side, quality)
            read, images = _shrink_images(read, images, shrinking, opened.enter_context(TemporaryFolder()), console)
        shards = assign_shards(images)
        paths, num_written = _write_missing(read, packed_store, shards, console)
        packed = packed_manifest(images, shards, paths, packed_store.url)

    # Write the index last, and check that it and all shards are there.
    packed_store.put(PACKED_INDEX, packed.to_parquet())
    missing = set(paths) - {stored.path for stored in packed_store.list("shards")}
    if missing or build_manifest(packed_store).digest != packed.digest:
        raise StorageError(
            f"{packed.url} lacks {len(missing):,} of {len(shards):,} shards, or its index; run the command again."
        )
    return PackResult(
        source=source_name,
        destination=packed.url,
        num_images=len(packed),
        num_classes=len(packed.classes),
        num_shards=len(shards),
        num_bytes=int(packed.sizes_bytes.sum()),
        num_written=num_written,
        digest=packed.digest,
    )


def _name_of_source(source: Location | Rows) -> str:
    """Return the name of a folder, a URL or a Ray dataset, which has none of its own; raise UsageError for others."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    if is_ray_dataset(source):
        return RAY_DATASET
    raise UsageError(
        f"raytrain.pack got a {type(source).__module__}.{type(source).__name__}; give a folder, a URL or a "
        "ray.data.Dataset, which ray.data.from_huggingface, from_torch, from_pandas or from_items make of others."
    )


def _refuse_other_images(destination: Store) -> None:
    """Raise UsageError if the destination has images: readers would see only the shards, not these images."""
    for stored in destination.list():
        if stored.path.lower().endswith(SUFFIXES):
            raise UsageError(
                f"{destination.url} has images already, such as {stored.path}, and --data would read the shards there "
                "in their place; give a new or an empty folder."
            )


def _shrink_images(
    read: _ReadFiles, images: Manifest, shrinking: Shrinking, folder: Path, console: Console
) -> tuple[_ReadFiles, Manifest]:
    """Write smaller files of the images into ``folder``, which ``read`` fetches, several threads at a time.

    Returns the function that reads the smaller files, and the manifest of the images with their sizes.
    """

    def file(key: str) -> Path:
        return folder / hashlib.sha256(key.encode()).hexdigest()  # a key may lead out of the folder

    def write_shrunk(start: int) -> list[int]:
        """Write smaller files of the next images from number ``start`` on; return their sizes in bytes."""
        part = images.select(np.arange(start, min(start + _NUM_SHRUNK_AT_ONCE, len(images))))
        return [
            file(key).write_bytes(_shrink_file(data, shrinking))
            for key, data in zip(part.keys.to_pylist(), read(part), strict=True)
        ]

    # Shrink all images first, because shards are cut by the sizes of files. The options become a part of the ETags, so
    # that other options lead to other shards.
    starts = range(0, len(images), _NUM_SHRUNK_AT_ONCE)
    sizes = [size for part in _in_threads(write_shrunk, starts, "Shrinking images", console) for size in part]
    etags = string_array([f"{etag}-{shrinking.shorter_side}-{shrinking.quality}" for etag in images.etags.to_pylist()])
    shrunk = replace(images, sizes_bytes=np.array(sizes), etags=etags, shrinking=shrinking)
    return lambda part: [file(key).read_bytes() for key in part.keys.to_pylist()], shrunk


def _shrink_file(data: bytes, shrinking: Shrinking) -> bytes:
    """Return the file of a smaller JPEG of the image in the file ``data``, or ``data`` itself.

    The file stays as it is if its shorter side is short enough, the JPEG would have more bytes, or it is no image.
    """
    from PIL import Image

    try:
        pixels = shrink(data, shrinking.shorter_side)
    except BadImage:  # a run that reads the packed file reports that
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
    """Write the shards that are missing or damaged; return the paths of all shards, and the number written.

    Raises StorageError if what is read back is not what was written.
    """
    # A path is the shard's number, a dash and a checksum: of one number there may be several, from other images.
    existing: dict[str, list[str]] = {}
    for stored in packed_store.list("shards"):
        existing.setdefault(stored.path.partition("-")[0], []).append(stored.path)

    # A shard that is there already, from an interrupted or an earlier packing, stays if it is whole and the same.
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
    """Call ``function`` for each item in a few threads, and show a progress bar; return the results in order.

    The first exception of a call is raised, and no further calls are begun.
    """
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pack")
    try:
        return list(
            track(pool.map(function, items), description, total=len(items), console=console, disable=console.is_jupyter)
        )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C does not wait for the calls that are left


def _fetch_unchanged(store: Store, images: Manifest) -> list[bytes]:
    """Return the files of ``images``, in their order.

    Raises StorageError if one is gone, has another size than when it was listed, or cannot be read.
    """
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
