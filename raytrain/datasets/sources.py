"""What `raytrain pack` reads: labelled images in folders, in archives, or beside a label file."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import fsspec
import numpy as np

from raytrain.data.labels.folders import is_test, is_training
from raytrain.data.labels.label_columns import JOINED, LabelColumns
from raytrain.data.labels.label_file import METADATA, LabelTable, own_label_table, read_label_file
from raytrain.data.labels.labelled_images import check_keys, labelled
from raytrain.data.labels.listing import is_hidden, lost_files, refuse_file
from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, build_manifest, list_images
from raytrain.datasets.archives import ARCHIVE_SUFFIXES, Archive, ArchivedImage
from raytrain.errors import UsageError
from raytrain.storage.folder import explain_os_error
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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
    archives = _archives(source, os.path.basename(labels.file or ""))
    if archives:
        if labels.file is not None or labels.columns.separator or len(labels.columns.label) > 1:
            raise UsageError(
                "--labels, --label-separator and several --label-column are for images in folders; those in "
                f"{archives[0]} have one label each in the file."
            )
        with TemporaryFolder() as folder:
            table = _unpack(source, archives, labels.columns, folder / "images")
            store = open_store(str(folder / "images"))
            images = replace(list_images(store), url=source)  # as messages should name it
            yield store, _by_table(images, table, labels)
        return
    store = open_store(source)
    if labels.file is None:
        table = own_label_table(store, labels.columns)
    else:
        table = read_label_file(labels.file, labels.columns, [store.url])
    if table is not None:
        yield store, _by_table(list_images(store), table, labels)
    elif labels.split is not None or labels.columns != LabelColumns():
        raise UsageError(
            "--split, --key-column, --label-column and --label-separator are for a label file, and none is beside "
            f"the images of {source}; give it with --labels."
        )
    else:
        yield store, build_manifest(store)


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
    return replace(labelled(images, table, [labels.split.lower()] if labels.split else ()), labels_digest="")


def _archives(source: str, label_file: str) -> Sequence[str]:
    """The Parquet files and tars that ``source`` names or holds, sorted; UsageError for those of training and test.

    A file called ``label_file`` beside others is none of them.
    """
    files = _files(source)
    if "*" in source:
        found = sorted(str(path) for path in files.glob(source) if str(path).endswith(ARCHIVE_SUFFIXES))
        if not found:
            raise UsageError(f"No file that ends in {', '.join(ARCHIVE_SUFFIXES)} matches {source}; check the path.")
        _refuse_splits(source, found)
        return found
    if not os.path.isdir(source):
        if source.endswith(ARCHIVE_SUFFIXES):
            return [source]
        refuse_file(source)
    open_store(source).check_readable()
    return _archives_in(files, source, {*METADATA, label_file})


def _archives_in(files: AbstractFileSystem, folder: str, tables: Set[str]) -> Sequence[str]:
    """The archives directly in ``folder``, or, as in repositories of Hugging Face's hub, in ``data`` below it."""
    entries = {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in files.ls(folder, detail=True)}
    if PACKED_INDEX in entries:
        return []
    found = _archives_among(entry for name, entry in entries.items() if name not in tables)
    others = [name for name in entries if not name.endswith(ARCHIVE_SUFFIXES) and not _is_plain(name)]
    is_repository = "data" in others and (len(others) == 1 or len(others) < len(entries))
    if not found and is_repository and entries["data"]["type"] == "directory":
        found = _archives_among(files.ls(entries["data"]["name"], detail=True))
        folder = f"{folder.rstrip('/')}/data"
    elif found and others:
        _log.warning("Left out of %s: %s that are no archives, such as %s.", folder, f"{len(others):,}", min(others))
    _refuse_splits(folder, found)
    return found


def _archives_among(entries: Iterable[dict[str, Any]]) -> list[str]:
    """The paths of those entries of a folder that are archives, sorted."""
    files = (str(entry["name"]) for entry in entries if entry["type"] == "file")
    return sorted(path for path in files if path.endswith(ARCHIVE_SUFFIXES))


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
    label_of: dict[str, tuple[str, str]] = {}  # and the split
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
                label_of[key] = image.label, image.split
                _write(folder / key, image, name)
        left_out += archive.left_out
        if repeated:
            raise UsageError(
                f"{len(repeated):,} images of {name} have names that others have, too: {', '.join(repeated[:3])}; "
                "give each a name of its own, or name another column with --key-column."
            )
    if reasons := lost_files(left_out):
        _log.warning("Left out of %s: %s.", source, reasons)
    if not label_of:
        others = f" and the {len(archives) - 1:,} files after it" if len(archives) > 1 else ""
        raise UsageError(f"There are no labelled images in {archives[0]}{others}.")
    keys = sorted(label_of)
    labels, splits = (np.array(texts, object) for texts in zip(*(label_of[key] for key in keys), strict=True))
    return LabelTable(source, np.array(keys, object), labels, splits, np.full(len(keys), "", object))


def _write(file: Path, image: ArchivedImage, archive: str) -> None:
    """Write an image's file. Raises UsageError if it cannot have this name."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image.content)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise explain_os_error(error, str(file)) from error
        raise UsageError(
            f"The image {image.key[:80]!r} of {archive} cannot be a file ({error.strerror}); name another column with "
            "--key-column, or give it another name."
        ) from None
    os.utime(file, (0, 0))  # the same images make the same shards again


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
    return fsspec.filesystem("file")
