"""What `raytrain pack` can read: class folders, images with a label file, Parquet files and WebDataset tars."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import numpy as np

from raytrain.data.label_file import LabelColumns, LabelTable, read_label_file
from raytrain.data.labelled_images import check_keys, labelled
from raytrain.data.manifest import PACKED_INDEX, Manifest, build_manifest, list_images
from raytrain.datasets.archives import ARCHIVE_SUFFIXES, read_archive
from raytrain.errors import UsageError
from raytrain.storage.base import Store
from raytrain.storage.open import open_store
from raytrain.storage.tempdir import TemporaryFolder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_METADATA = ("metadata.csv", "metadata.parquet")
"""Label files of Hugging Face's image folders."""
_MAX_UNKNOWN_FRACTION = 0.01


@contextmanager
def labelled_source(source: str, labels: str | None) -> Iterator[tuple[Store, Manifest]]:
    """The store of labelled images, and their manifest; archives are unpacked into a temporary folder meanwhile.

    Args:
        source: a folder or ``s3://`` prefix of images or of archives, one archive, or a pattern of several, with ``*``.
        labels: a label file; by default ``metadata.csv`` beside the images, as in Hugging Face's image folders, else
            their folders are the labels.
    """
    source = source if "://" in source else os.path.expanduser(source)
    archives = _archives(source)
    if archives:
        if labels is not None:
            raise UsageError(
                f"--labels is for images in folders; those in {archives[0]} have their labels in the file."
            )
        with TemporaryFolder() as folder:
            table = _unpack(source, archives, folder / "images")
            store = open_store(str(folder / "images"))
            yield store, _by_table(replace(list_images(store), url=source), table)  # as messages should name it
        return
    store = open_store(source)
    labels = labels or _metadata(source, store)
    if labels is None:
        yield store, build_manifest(store)
    else:
        yield store, _by_table(list_images(store), read_label_file(labels, LabelColumns()))


def _by_table(images: Manifest, table: LabelTable) -> Manifest:
    if images.packing is None:  # the caller refuses what is packed already
        check_keys(table, (images,), _MAX_UNKNOWN_FRACTION)
    return replace(labelled(images, table)[0], labels_digest="")  # from now on they are the images' own labels


def _metadata(source: str, store: Store) -> str | None:
    """The label file that lies beside the images; None if there is none."""
    name = next((name for name in _METADATA if store.exists(name)), None)
    return name and f"{source.rstrip('/')}/{name}"


def _archives(source: str) -> Sequence[str]:
    """The Parquet files and tars that ``source`` names or holds, sorted; empty if it holds images.

    Raises UsageError if a pattern matches none, or a folder has those of training and of test images.
    """
    files = _files(source)
    if "*" in source:
        found = sorted(str(path) for path in files.glob(source) if str(path).endswith(ARCHIVE_SUFFIXES))
        if not found:
            raise UsageError(f"No file that ends in {' or '.join(ARCHIVE_SUFFIXES)} matches {source}; check the path.")
        return found
    if source.endswith(ARCHIVE_SUFFIXES):
        return [source]
    open_store(source).check_readable()
    names = {path.rstrip("/").rpartition("/")[2]: path for path in files.ls(source, detail=False)}
    if PACKED_INDEX in names:
        return []
    found = sorted(path for name, path in names.items() if name.endswith(ARCHIVE_SUFFIXES) and name not in _METADATA)
    _refuse_splits(source, found)
    return found


def _refuse_splits(source: str, archives: Sequence[str]) -> None:
    splits = {path.rpartition("/")[2].partition("-")[0] for path in archives}
    if "train" in splits and splits & {"test", "validation", "val"}:
        raise UsageError(
            f"{source} has archives of training and of test images; pack each by a pattern, such as {source}/train-*."
        )


def _unpack(source: str, archives: Sequence[str], folder: Path) -> LabelTable:
    """Write the images of the archives below ``folder``, and return their labels."""
    rows: list[tuple[str, str]] = []
    files = _files(source)
    for archive in archives:
        with files.open(archive, "rb") as file:
            for image in read_archive(archive, cast(IO[bytes], file)):
                path = folder / image.key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image.content)
                os.utime(path, (0, 0))  # the same images make the same shards again
                rows.append((image.key, image.label))
    if not rows:
        raise UsageError(f"There are no labelled images in {archives[0]} and the {len(archives) - 1:,} files after it.")
    keys, labels = (np.array(column, object) for column in zip(*sorted(rows), strict=True))
    empty = np.full(len(rows), "", object)
    return LabelTable(source, keys, labels, empty, empty)


def _files(source: str) -> AbstractFileSystem:
    if "://" in source:
        from raytrain.storage.filesystem import filesystem  # s3fs takes a second to import

        return filesystem(source)
    from fsspec.implementations.local import LocalFileSystem

    return LocalFileSystem()
