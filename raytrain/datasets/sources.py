"""Sources of `raytrain pack`, labelled images in folders, in archives, in a Ray dataset, or beside a label file."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import fsspec
import numpy as np

from raytrain.data.labels.class_names import plain_booleans
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.label_columns import JOINED, NO_LABELS, LabelColumns, is_whole_number, single_classes
from raytrain.data.labels.label_file import LabelTable, comparable_key, own_label_table, read_label_file
from raytrain.data.labels.label_formats import METADATA
from raytrain.data.labels.label_pattern import table_by_pattern
from raytrain.data.labels.labelled_images import check_keys, labelled
from raytrain.data.labels.listing import is_hidden, lost_files, refuse_file
from raytrain.data.labels.manifest import PACKED_INDEX, Manifest, list_images
from raytrain.data.labels.part_names import is_training, parts_among
from raytrain.datasets.archive import ARCHIVE_SUFFIXES, TAR_SUFFIXES, Archive, ArchivedImage, is_archive, visible_path
from raytrain.datasets.parquet_archive import ParquetArchive
from raytrain.datasets.ray_dataset import RAY_DATASET, RayDatasetRows, Rows
from raytrain.datasets.tar_archive import TarArchive
from raytrain.errors import UsageError, format_count
from raytrain.storage.folder import explain_os_error, refuse_links_out
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_log = logging.getLogger("raytrain")
_TABLE_LOGS = ("_delta_log", ".hoodie")  # of Delta Lake and Hudi
_DESCRIPTION_SUFFIXES = (".md", ".json", ".txt", ".py", ".yaml")


@dataclass(frozen=True)
class Labelling:
    """The source of the labels: a label file, a pattern of file names, or by default the folders of the images."""

    file: str | None = None
    """A label file; by default ``metadata.csv`` or the like beside the images, as in Hugging Face's image folders."""
    columns: LabelColumns = field(default_factory=LabelColumns)
    split: str | None = None  # the value of the column ``split`` whose images are taken; required if there are several
    max_bad_fraction: float = 0.01  # fraction of a label file's keys that may have no image
    pattern: str | None = None  # finds the labels in the names of files; see raytrain.data.labels.label_pattern
    image_suffix: str | None = None  # see :class:`~raytrain.datasets.tar_archive.TarArchive`


@contextmanager
def labelled_source(source: str | Rows, labels: Labelling) -> Iterator[tuple[Store, Manifest]]:
    """Yield the store and the manifest of the labelled images of ``source``, which may be used until the block ends.

    ``source`` is a folder or a bucket's URL of images or of archives, one archive, or a pattern of several, with ``*``;
    or a ``ray.data.Dataset``. Archives and the rows of a dataset are unpacked into a temporary folder, which is removed
    at the end.

    Raises UsageError if there are no labelled images, or ``labels`` does not fit the source, and StorageError if
    something cannot be read.
    """
    # The rows of a Ray dataset are read like an archive.
    opened: Sequence[_OpenedArchive]
    if isinstance(source, str):
        source = source if "://" in source else os.path.expanduser(source)
        archives = _archives(source, os.path.basename(labels.file or ""))
        opened = _open_archives(source, archives, labels)
    else:
        opened = [("", RayDatasetRows(RAY_DATASET, labels.columns), nullcontext(source))]
        source, archives = RAY_DATASET, [RAY_DATASET]

    # Archives are unpacked into files, with a table of their labels.
    if labels.image_suffix is not None and not any(archive.lower().endswith(TAR_SUFFIXES) for archive in archives):
        raise UsageError(
            f"--image-suffix is {labels.image_suffix}, which names an image of each sample in a tar of WebDataset, and "
            f"{source} is none; leave it out."
        )
    if archives:
        is_labelled = labels.file is not None or labels.pattern is not None
        if is_labelled or labels.columns.separator or len(labels.columns.label) > 1:
            raise UsageError(
                "--labels, --label-pattern, --label-separator and several --label-column are for images in folders; "
                f"those in {archives[0]} have one label each."
            )
        with TemporaryFolder() as folder:
            table = _unpack(source, opened, folder / "images")
            store = open_store(str(folder / "images"))
            images = replace(list_images(store), url=source)  # so that messages name the source
            yield store, _label_by_table(images, table, labels)
        return

    # Images in folders are labelled by a pattern, a label file that is given or lies beside them, or their folders.
    store = open_store(source)
    if labels.pattern is not None:
        table = table_by_pattern(store, labels.pattern, labels.columns, labels.max_bad_fraction)
    elif labels.file is None:
        table = own_label_table(store, labels.columns)
    else:
        table = read_label_file(labels.file, labels.columns, [store.url])
    if table is not None:
        yield store, _label_by_table(table.images or list_images(store), table, labels)
    elif labels.split is not None or labels.columns != LabelColumns():
        raise UsageError(
            "--split, --key-column, --label-column and --label-separator are for a label file, and none is beside "
            f"the images of {source}; give it with --labels."
        )
    else:
        yield store, build_manifest(store)


def _label_by_table(images: Manifest, table: LabelTable, labels: Labelling) -> Manifest:
    """Return the images that ``table`` labels, of the split that ``labels`` names if there are several.

    The manifest has no digest of the table, since the shards will contain the labels. Raises UsageError if the split to
    pack is not named or not there, or too many rows have no image.
    """
    # A shard has one label for each image, so several classes are joined into one text. If each image has exactly one,
    # that is the label, and the shards need no label file.
    are_joined = table.classes is not None and not table.has_one_class_each
    if are_joined:
        texts = [label.replace(JOINED, "|") or "none" for label in table.labels]
        table = replace(table, labels=np.array(texts, object))
        _log.warning(
            "Shards hold one text per image, such as %r; train on them with --labels %s and the same columns.",
            max(texts, key=len),
            table.url,
        )
    table = replace(table, classes=None)

    # Pack one split at a time, because training and held-out images would become one data set.
    splits = sorted(set(table.splits) - {""})
    if len(splits) > 1 and labels.split is None:
        raise UsageError(
            f"{table.url} has the splits {', '.join(splits)}, which would become one data set; pack each with --split, "
            f"such as --split {splits[-1]}."
        )
    if labels.split is not None and labels.split.lower() not in splits:
        raise UsageError(f"--split is {labels.split}, and {table.url} has the splits {', '.join(splits) or 'none'}.")
    if images.packing is None:  # packed images are refused by the caller
        check_keys(table, (images,), labels.max_bad_fraction)
    chosen = [labels.split.lower()] if labels.split else ()
    return replace(labelled(images, table, chosen, are_joined=are_joined), labels_digest="")


def _archives(source: str, label_file: str) -> Sequence[str]:
    """Return the sorted Parquet files and tars that ``source`` names or contains; none if it is a folder of images.

    They are directly in a folder, or in its folder ``data``, as in repositories of Hugging Face's hub. Hidden files and
    one called ``label_file`` do not count, and the Parquet files of packed shards are no archives.

    Raises UsageError if ``source`` is a file of another kind, a pattern that no archive matches, or has archives both
    of training and of held-out images; StorageError if it cannot be listed.
    """
    files = _filesystem(source)
    if "*" in source:
        return _archives_of_pattern(files, source)

    # The name of an archive may be that of a folder, too: Spark writes photos.parquet/part-0.parquet. In a bucket, the
    # store is asked for the object first, since its errors say what is wrong with the bucket or the credentials.
    if is_archive(source.rstrip("/")) and "://" in source:
        archive = source.rstrip("/")
        folder, _, name = archive.rpartition("/")
        if open_store(folder).exists(name) or not files.isdir(archive):
            return [archive]
    elif not os.path.isdir(source):
        if is_archive(source):
            return [source]
        refuse_file(source)  # returns for a bucket's URL, and for a missing folder, which is reported below
    open_store(source).check_readable()
    try:
        listed = files.ls(source, detail=True)
    except FileNotFoundError:  # no such prefix in the bucket, which listing the images will report
        return []
    return _archives_in_folder(files, source, listed, label_file)


def _archives_of_pattern(files: AbstractFileSystem, pattern: str) -> Sequence[str]:
    """Return the sorted archives that ``pattern`` matches, with the exceptions of :func:`_archives`."""
    # In a bucket, our own store looks first whether the folder can be listed: s3fs has no sentence for a wrong bucket
    # or credentials, and takes a listing that breaks off for a short one.
    folder = pattern.partition("*")[0].rpartition("/")[0]
    if "://" in pattern:
        open_store(folder).check_readable()
    with _explained(pattern):
        entries = cast("dict[str, Any]", files.glob(pattern, detail=True)).values()
    archives = _archives_among(entries, folder or "/")
    if not archives:
        raise UsageError(f"No file that ends in {', '.join(ARCHIVE_SUFFIXES)} matches {pattern}; check the path.")
    _refuse_splits(pattern, archives)
    return archives


def _archives_in_folder(
    files: AbstractFileSystem, folder: str, listed: Iterable[dict[str, Any]], label_file: str
) -> Sequence[str]:
    """Return the sorted archives that are ``listed`` in ``folder``, or in its folder ``data``, as :func:`_archives`."""
    # The Parquet files beside an index of packed shards are no archives.
    entries = {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in listed}
    if PACKED_INDEX in entries:
        return []
    others_than_tables = (entry for name, entry in entries.items() if name not in {*METADATA, label_file})
    archives = _archives_among(others_than_tables, folder)

    # The log of such a table says which of its files still count. The others hold rows that were deleted or replaced.
    if archives and (log := next((name for name in _TABLE_LOGS if name in entries), None)):
        raise UsageError(
            f"{folder} is a table whose log, {log}/, says which of its Parquet files count; write the table as plain "
            "Parquet files with the program that it is from, and pack those."
        )

    # Without archives, a repository of Hugging Face has them in "data". It is one if that folder is alone, or beside
    # descriptions or hidden files; a folder "data" beside nothing but other folders may be a class.
    other_entries = [
        name
        for name in entries
        if not is_archive(name) and not name.endswith(_DESCRIPTION_SUFFIXES) and not is_hidden(name)
    ]
    has_descriptions = len(other_entries) < len(entries)
    is_repository = "data" in other_entries and (other_entries == ["data"] or has_descriptions)
    if not archives and is_repository and entries["data"]["type"] == "directory":
        folder = f"{folder.rstrip('/')}/data"
        archives = _archives_among(files.ls(entries["data"]["name"], detail=True), folder)
    elif archives and other_entries:
        _log.warning(
            "Left out of %s: %s that are no archives, such as %s.",
            folder,
            f"{len(other_entries):,}",
            min(other_entries),
        )
    _refuse_splits(folder, archives)
    return archives


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Raise UsageError if the block finds no archive ``path``, and StorageError if it cannot read it."""
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}; check the path.") from None
    except OSError as error:
        raise explain_os_error(error, path) from error


def _archives_among(entries: Iterable[dict[str, Any]], folder: str) -> list[str]:
    """Return the sorted paths of the archives among the entries of a folder, which fsspec has listed in detail.

    Raises UsageError if some are links that lead out of the folder, as in the cache of Hugging Face's hub.
    """
    archives, links = list[str](), list[str]()
    for entry in entries:
        # A Mac writes a file ._0.tar beside 0.tar on disks of other systems.
        path, is_link = str(entry["name"]), bool(entry.get("islink"))
        if not is_archive(path) or is_hidden(posixpath.basename(path)):
            continue
        if entry["type"] == "file" or (is_link and os.path.isfile(path)):
            archives.append(path)
        if is_link:
            links.append(os.path.relpath(path, folder))
    if links:
        refuse_links_out(open_store(folder), links)
    return sorted(archives)


def _refuse_splits(source: str, archives: Sequence[str]) -> None:
    """Raise UsageError if names of the archives, or of folders that they do not share, say training and held-out."""
    shared_folder = os.path.commonpath([os.path.dirname(path) for path in archives]) if archives else ""
    paths = [path.removeprefix(shared_folder).strip("/").split("/") for path in archives]
    parts = parts_among(name for path in paths for name in path)
    if not parts:
        return
    training = next(filter(is_training, parts))
    pattern = "train*" if training in {path[-1] for path in paths} else f"{training}/*"
    raise UsageError(
        f"{source} has archives of training and of held-out images; pack each by a pattern, such as "
        f"{source.partition('*')[0].rstrip('/')}/{pattern}."
    )


_OpenedArchive = tuple[str, Archive, AbstractContextManager[Any]]
"""The folder for an archive's images, the archive, and the context manager that opens its file."""


def _open_archives(source: str, archives: Sequence[str], labels: Labelling) -> list[_OpenedArchive]:
    """Return each archive with a folder for its images and the context that opens its file.

    The folder is called like the archive, without its suffix. If two archives have the same name, the folders that they
    do not share come before it: ``a/0.tar`` and ``b/0.tar`` are unpacked into ``a/0`` and ``b/0``.
    """
    paths = [re.sub(r"(?i)(\.tar)?\.[a-z]+$", "", path) for path in archives]
    folders = [path.rpartition("/")[2] for path in paths]
    if len(set(folders)) < len(folders):
        shared_folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        folders = [path.removeprefix(shared_folder).strip("/") for path in paths]
    files = _filesystem(source) if archives else None

    @contextmanager
    def opened(path: str) -> Iterator[IO[bytes]]:
        assert files is not None
        with _explained(path), files.open(path, "rb") as file:
            yield cast(IO[bytes], file)

    readers: list[Archive] = [
        ParquetArchive(path, labels.columns)
        if path.lower().endswith(".parquet")
        else TarArchive(path, labels.columns, image_suffix=labels.image_suffix)
        for path in archives
    ]
    return list(zip(folders, readers, map(opened, archives), strict=True))


def _unpack(source: str, opened: Sequence[_OpenedArchive], folder: Path) -> LabelTable:
    """Write the images of all archives below ``folder``, and return the table of their labels and splits.

    Logs what was left out and chosen. Raises UsageError if two images have the same key, the labels of one archive are
    numbers and those of another names, or there is no labelled image.
    """
    label_and_split_of: dict[str, tuple[str, str]] = {}  # by key
    # The first archive whose labels are all numbers (True), and the first whose labels are all names (False), with one
    # label of each.
    first_of_kind: dict[bool, tuple[str, str]] = {}
    repeated: list[str] = []
    left_out: Counter[str] = Counter()
    choices: set[str] = set()

    # Unpack archive after archive. No image may replace another one, and if the labels of one archive are all numbers,
    # those of another must not be all names.
    for prefix, archive, opening in opened:
        name, labels_of_archive = archive.name, set[str]()
        with opening as content:
            for image in archive.read(content):
                key = visible_path(f"{prefix}/{image.key}")
                if key in label_and_split_of:
                    repeated.append(image.key)
                    continue
                label_and_split_of[key] = image.label, image.split
                labels_of_archive.add(image.label)
                _write(folder / key, image, name)
        left_out += archive.left_out
        choices |= archive.choices
        if repeated:
            raise UsageError(
                f"{name} has {format_count(len(repeated), 'image')} with the name of another one: "
                f"{', '.join(repeated[:3])}; "
                "give each a name of its own, or name another column with --key-column."
            )
        are_numbers = set(map(is_whole_number, labels_of_archive - NO_LABELS))
        if len(are_numbers) == 1:
            first_of_kind.setdefault(are_numbers.pop(), (name, min(labels_of_archive)))
    if len(first_of_kind) == 2:
        (with_numbers, number), (with_names, class_name) = first_of_kind[True], first_of_kind[False]
        raise UsageError(
            f"The labels of {with_numbers} are numbers, such as {number!r}, and those of {with_names} are names, such "
            f"as {class_name!r}, which would become different classes; write the names into all archives, or, if the "
            "numbers are classes of their own, unpack the images into class folders."
        )

    # Report what was chosen and left out in all archives, and make one table of their labels, in the order of the keys.
    for choice in sorted(choices):
        _log.warning("In %s, %s.", source, choice)
    if reasons := lost_files(left_out):
        _log.warning("Left out of %s: %s.", source, reasons)
    keys = sorted(label_and_split_of, key=comparable_key)
    labels, splits = ([label_and_split_of[key][column] for key in keys] for column in (0, 1))
    if not any(archive.has_class_folders for _, archive, _ in opened):  # whose names are classes as they are
        labels = single_classes(labels, source)
    if not any(labels):
        after_it = f" and the {format_count(len(opened) - 1, 'file')} after it" if len(opened) > 1 else ""
        raise UsageError(f"There are no labelled images in {opened[0][1].name}{after_it}.")
    return LabelTable(
        source,
        keys=np.array(list(map(comparable_key, keys)), object),
        labels=np.array(plain_booleans(labels), object),
        splits=np.array(splits, object),
        groups=np.array([""] * len(keys), object),
    )


def _write(file: Path, image: ArchivedImage, archive: str) -> None:
    """Write an image of ``archive`` to a file, whose modification time stands for its content.

    Raises UsageError if no file can have its name, or another image has taken the place, and StorageError if the disk
    cannot be written.
    """
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
    # The modification time is a part of the file's ETag, so derive it from the content: then the same images become the
    # same shards again, and changed images other ones.
    digest = hashlib.sha256(image.content).digest()
    os.utime(file, ns=(0, int.from_bytes(digest[:7], "big")))


def _filesystem(source: str) -> AbstractFileSystem:
    """Return the file system in which archives are looked for: that of a bucket, or this machine's."""
    if "://" in source:
        from raytrain.storage.filesystem import filesystem  # s3fs takes a second to import

        return filesystem(source)
    return fsspec.filesystem("file")
