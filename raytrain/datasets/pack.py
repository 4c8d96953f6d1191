"""`raytrain pack`: labelled images, from folders or archives, into packed shards."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import numpy as np
from rich.console import Console
from rich.progress import track

from raytrain.data.labels.folders import is_hidden, is_test, is_training, refuse_file
from raytrain.data.labels.label_file import JOINED, LabelColumns, LabelTable, read_label_file
from raytrain.data.labels.labelled_images import check_keys, labelled
from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, build_manifest, list_images
from raytrain.data.shards import assign_shards, encode_shard, images_by_shard, is_shard_of
from raytrain.datasets.archives import ARCHIVE_SUFFIXES, Archive
from raytrain.errors import StorageError, UsageError
from raytrain.storage.folder import refuse_links_out
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # label files of Hugging Face's image folders
_log = logging.getLogger("raytrain")


@dataclass(frozen=True)
class Labelling:
    """Where the labels of the images are, if not in the names of their folders."""

    file: str | None = None
    """A label file; by default ``metadata.csv`` or ``.jsonl`` beside the images, as in Hugging Face's image folders."""
    columns: LabelColumns = field(default_factory=LabelColumns)
    split: str | None = None  # the value of the column ``split`` whose images are taken; needed if there are several
    max_bad_fraction: float = 0.01  # of the keys of a label file, may have no image


@contextmanager
def labelled_source(source: str, labels: Labelling) -> Iterator[tuple[Store, Manifest]]:
    """The store of labelled images, and their manifest; archives are unpacked into a temporary folder meanwhile.

    ``source`` is a folder or ``s3://`` prefix of images or of archives, one archive, or a pattern of several, with
    ``*``.
    """
    source = source if "://" in source else os.path.expanduser(source)
    archives = _archives(source)
    if archives:
        if labels.file is not None:
            raise UsageError(
                f"--labels is for images in folders; those in {archives[0]} have their labels in the file."
            )
        with TemporaryFolder() as folder:
            table = _unpack(source, archives, labels.columns, folder / "images")
            store = open_store(str(folder / "images"))
            images = replace(list_images(store), url=source)  # as messages should name it
            yield store, _by_table(images, table, labels)
        return
    store = open_store(source)
    file = labels.file or _metadata(source, store)
    if file is None:
        yield store, build_manifest(store)
    else:
        yield store, _by_table(list_images(store), read_label_file(file, labels.columns, [store.url]), labels)


def _by_table(images: Manifest, table: LabelTable, labels: Labelling) -> Manifest:
    """The images with the table's labels, which are their own from now on."""
    if table.classes is not None:
        texts = [label.replace(JOINED, "|") or "none" for label in table.labels]
        table = replace(table, labels=np.array(texts, object), classes=None)
        _log.warning(
            "Shards hold one text per image, such as %r; train on them with --labels %s and the same columns.",
            max(texts, key=len),
            table.url,
        )
    splits = sorted(set(table.splits) - {""})
    if len(splits) > 1 and labels.split is None:
        raise UsageError(
            f"{table.url} has the splits {', '.join(splits)}, which would become one data set; pack each with --split, "
            f"such as --split {splits[-1]}."
        )
    if labels.split is not None and labels.split.lower() not in splits:
        raise UsageError(f"--split is {labels.split}, and {table.url} has the splits {', '.join(splits) or 'none'}.")
    if images.packing is None:  # the caller refuses what is packed already
        check_keys(table, (images,), labels.max_bad_fraction)
    return replace(labelled(images, table, [labels.split.lower()] if labels.split else ())[0], labels_digest="")


def _metadata(source: str, store: Store) -> str | None:
    """The label file that lies beside the images; None if there is none."""
    name = next((name for name in _METADATA if store.exists(name)), None)
    return name and f"{source.rstrip('/')}/{name}"


def _archives(source: str) -> Sequence[str]:
    """The Parquet files and tars that ``source`` names or holds, sorted; UsageError for those of training and test."""
    files = _files(source)
    if "*" in source:
        found = sorted(str(path) for path in files.glob(source) if str(path).endswith(ARCHIVE_SUFFIXES))
        if not found:
            raise UsageError(f"No file that ends in {', '.join(ARCHIVE_SUFFIXES)} matches {source}; check the path.")
        _refuse_splits(source, found)
        return found
    if source.endswith(ARCHIVE_SUFFIXES):
        return [source]
    if not os.path.isdir(source):
        refuse_file(source)
    open_store(source).check_readable()
    return _archives_in(files, source)


def _archives_in(files: AbstractFileSystem, folder: str) -> Sequence[str]:
    """The archives directly in ``folder``, or, as in repositories of Hugging Face's hub, in ``data`` below it."""
    names = {path.rstrip("/").rpartition("/")[2]: path for path in files.ls(folder, detail=False)}
    if PACKED_INDEX in names:
        return []
    found = sorted(path for name, path in names.items() if name.endswith(ARCHIVE_SUFFIXES) and name not in _METADATA)
    if not found and "data" in names and set(map(_is_plain, names)) == {False, True}:
        below = files.ls(names["data"], detail=False) if files.isdir(names["data"]) else []
        found = sorted(path for path in below if path.endswith(ARCHIVE_SUFFIXES))
    _refuse_splits(folder, found)
    return found


def _is_plain(name: str) -> bool:
    """Whether a file of a repository is beside the data: a description, or hidden."""
    return is_hidden(name) or name.endswith((".md", ".json", ".txt", ".py", ".yaml"))


def _refuse_splits(source: str, archives: Sequence[str]) -> None:
    """Raise UsageError if the names say that some archives are of training images and some of test images."""
    words = {word for path in archives for word in re.split(r"[-_.]", path.rpartition("/")[2])}
    if any(map(is_training, words)) and any(map(is_test, words)):
        raise UsageError(
            f"{source} has archives of training and of test images; pack each by a pattern, such as "
            f"{source.partition('*')[0].rstrip('/')}/train*."
        )


def _unpack(source: str, archives: Sequence[str], columns: LabelColumns, folder: Path) -> LabelTable:
    """Write the images of the archives below ``folder``, and return their labels."""
    label_of: dict[str, str] = {}
    repeated: list[str] = []
    left_out: Counter[str] = Counter()
    files = _files(source)
    for name, prefix in zip(archives, _prefixes(archives), strict=True):
        archive = Archive(name, columns)
        with files.open(name, "rb") as file:
            for image in archive.read(cast(IO[bytes], file)):
                key = f"{prefix}/{image.key}"
                if key in label_of:
                    repeated.append(image.key)
                    continue
                label_of[key] = image.label
                path = folder / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image.content)
                os.utime(path, (0, 0))  # the same images make the same shards again
        left_out += archive.left_out
        if repeated:
            raise UsageError(
                f"{len(repeated):,} images of {name} have names that others have, too: {', '.join(repeated[:3])}; "
                "give each a name of its own, or name another column with --key-column."
            )
    if left_out:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
        _log.warning("Left out of %s: %s.", source, reasons)
    if not label_of:
        raise UsageError(f"There are no labelled images in {archives[0]} and the {len(archives) - 1:,} files after it.")
    keys = sorted(label_of)
    empty = np.full(len(keys), "", object)
    return LabelTable(source, np.array(keys, object), np.array([label_of[key] for key in keys], object), empty, empty)


def _prefixes(archives: Sequence[str]) -> list[str]:
    """A folder name for each archive: its name, with as many of its folders as make it unique."""
    names = [re.sub(r"(\.tar)?\.[a-z]+$", "", path) for path in archives]
    short = [name.rpartition("/")[2] for name in names]
    if len(set(short)) == len(short):
        return short
    shared = len(os.path.commonpath([os.path.dirname(name) for name in names]))
    return [name[shared:].strip("/") for name in names]


def _files(source: str) -> AbstractFileSystem:
    if "://" in source:
        from raytrain.storage.filesystem import filesystem  # s3fs takes a second to import

        return filesystem(source)
    from fsspec.implementations.local import LocalFileSystem

    return LocalFileSystem()


_NUM_CONCURRENT_SHARDS = 4  # each fetches its images with all of the store's threads


@dataclass(frozen=True)
class PackResult:
    """What :func:`pack` has done."""

    source: str
    destination: str
    num_images: int
    num_classes: int
    num_shards: int
    num_bytes: int  # of all images
    num_written: int  # shards written this time
    digest: str  # of keys, labels, sizes and shards (see :attr:`Manifest.digest`)


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
