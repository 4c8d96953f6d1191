"""Label files: tables with a row for each image, of which columns say key and class, perhaps split and group."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from raytrain.data.labels.folders import (
    first_names,
    is_part,
    is_test,
    is_training,
    parts_among,
    read_folders,
    top_folders,
)
from raytrain.data.labels.label_columns import (
    JOINED,
    KEY_COLUMNS,
    LABEL_COLUMNS,
    NO_LABELS,
    LabelColumns,
    Texts,
    classes_of,
    column_called,
    find_column,
    labels_of,
    texts_of,
)
from raytrain.data.labels.label_formats import read_table
from raytrain.data.labels.listing import check_folder
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.storage.store import Store

pc: Any = pyarrow.compute  # whose functions are made at import

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # label files of Hugging Face's image folders
_log = logging.getLogger("raytrain")
_MOST_SPLITS = 20


@dataclass(frozen=True, eq=False)
class LabelTable:
    """The N rows of a label file, sorted by key, each key once."""

    url: str
    keys: Texts  # (N,), paths relative to the folder of the images, or below it as a URL
    labels: Texts  # (N,), names of classes; empty if an image has none; several are joined by JOINED
    splits: Texts  # (N,), in lower case; empty if no column says which images are tested on
    groups: Texts  # (N,), empty if there are no groups
    classes: tuple[str, ...] | None = None
    """All classes if an image may have several of them, or none; None if it has one, or no label."""

    def tested_on(self, other: LabelTable) -> LabelTable:
        """These rows to train on, and the ``other`` ones to test on. Raises UsageError if an image is in both."""
        for table, is_own in ((self, is_training), (other, is_test)):
            if any(table.splits) and not all(map(is_own, table.splits)):
                raise UsageError(f"{table.url} says itself which images are tested on; give it alone, with --labels.")
        if len(both := np.intersect1d(self.keys, other.keys)):
            raise UsageError(
                f"{self.url} and {other.url} both have {len(both):,} images, such as {both[0]!r}; leave each in one."
            )
        keys = np.concatenate([self.keys, other.keys])
        splits = np.repeat(np.array(["train", "test"], object), [len(self.keys), len(other.keys)])
        labels, groups = np.concatenate([self.labels, other.labels]), np.concatenate([self.groups, other.groups])
        order = keys.argsort()
        classes = None if self.classes is None else tuple(dict.fromkeys((*self.classes, *(other.classes or ()))))
        url = f"{self.url} and {other.url}"
        return LabelTable(url, keys[order], labels[order], splits[order], groups[order], classes)

    @property
    def digest(self) -> str:
        """SHA-256 of all rows, as hexadecimal digits: the same for the same rows in any order and format."""
        columns = (self.keys, self.labels, self.splits, self.groups)
        return hashlib.sha256("\1".join("\0".join(column) for column in columns).encode()).hexdigest()

    def rows_of(self, images: Manifest) -> Int64s:
        """The row of each image, (len(images),); -1 if it has none."""
        keys = [unicodedata.normalize("NFC", str(key)) for key in images.keys.to_pylist()]
        row_of = {key: row for row, key in enumerate(self.keys)}
        for form in (str, _stem, posixpath.basename, lambda key: _stem(posixpath.basename(key))):
            rows = np.array([row_of.get(form(key), -1) for key in keys], np.int64)
            if (rows >= 0).any():  # many tables have keys without suffixes, or without folders
                return rows
        row_of = self._rows_below(posixpath.basename(images.url.rstrip("/")))
        for form in (str, _stem):
            rows = np.array([row_of.get(form(key), -1) for key in keys], np.int64)
            if (rows >= 0).any():
                return rows
        return np.full(len(keys), -1)

    def _rows_below(self, folder: str) -> dict[str, int]:
        """The row of each path below a ``folder`` of this name, wherever it is; none if a path is there twice."""
        below = [(f"/{key}".partition(f"/{folder}/")[2], row) for row, key in enumerate(self.keys)]
        row_of = {path: row for path, row in below if path}
        return row_of if len(row_of) == sum(path != "" for path, _ in below) else {}


def _stem(key: str) -> str:
    return posixpath.splitext(key)[0]


def read_label_file(url: str, columns: LabelColumns, images_urls: Sequence[str] = ()) -> LabelTable:
    """Read a file, or an object of a bucket, that ends in .csv, .tsv, .txt, .json, .jsonl or .parquet.

    Keys may be paths relative to the images, or start with one of ``images_urls``.

    Raises:
        StorageError: it cannot be read.
        UsageError: it is no such table, lacks a column, or gives the same key different labels.
    """
    return label_table(read_table(url, columns.key_names, columns.label_names), url, columns, images_urls)


def own_label_table(store: Store, columns: LabelColumns | None = None) -> LabelTable | None:
    """The rows of the label file that lies beside the images, as in Hugging Face's image folders; None without labels.

    Raises the same as :func:`read_label_file`.
    """
    columns = columns or LabelColumns()
    check_folder(store)
    name = next(filter(store.exists, METADATA), None)
    if name is None:
        return None
    url = f"{store.url.rstrip('/')}/{name}"
    table = read_table(url, columns.key_names, columns.label_names)
    if not columns.label and find_column(table.column_names, None, LABEL_COLUMNS) is None:
        sentence = "%s has no column of labels among %s, and is not read; --labels and --label-column name one."
        _log.warning(sentence, url, ", ".join(table.column_names[:10]))
        return None
    _log.warning("The classes are those in %s, whatever folders the images are in.", url)
    return label_table(table, url, columns, [store.url])


def label_table(table: pa.Table, url: str, columns: LabelColumns, images_urls: Sequence[str]) -> LabelTable:
    """The rows of a table of the label file ``url``; raises UsageError as :func:`read_label_file` does."""
    if not len(table):
        raise UsageError(f"The label file {url} has no row; it must have one for each image.")
    none = [""] * len(table)
    texts = texts_of(table, url, column_called(table, url, "--key-column", columns.key, KEY_COLUMNS))
    keys = [normalized_key(key, images_urls) for key in texts.to_pylist()]
    is_list = len(table.column_names) == 1 and not columns.label
    split = _split_column(table, url, columns)
    group = columns.group and column_called(table, url, "--group-by", columns.group)
    rows = pa.table(
        {
            "key": keys,
            "label": _labels_by_folders(keys, url) if is_list else labels_of(table, url, columns),
            "split": pc.utf8_lower(texts_of(table, url, split)) if split else none,
            "group": texts_of(table, url, group) if group else none,
        }
    )
    if num_without := len(rows) - len(rows := rows.filter(pc.not_equal(rows["key"], ""))):
        _log.warning("%s rows of %s name no image, and are not used.", f"{num_without:,}", url)
    rows = rows.group_by(rows.column_names).aggregate([]).sort_by("key")  # a row that is there twice counts once
    keys, labels, splits, groups = (np.array(rows[name].to_pylist(), object) for name in rows.column_names)
    splits = splits if any(splits) else _folder_splits(keys, url)
    found = LabelTable(url, keys, labels, splits, groups, classes_of(labels, columns))
    _check_rows(found, columns.group)
    return found


def normalized_key(key: str, images_urls: Sequence[str]) -> str:
    """An image's path below one of ``images_urls``: ``./a//b.png`` and the whole URL are ``a/b.png``."""
    key = unicodedata.normalize("NFC", key.strip()).removeprefix("file://")
    if "\\" in key and "/" not in key:
        key = key.replace("\\", "/")  # as Windows writes paths
    scheme, separator, path = key.rpartition("://")
    path = posixpath.normpath(path).removeprefix("./") if path else ""
    key = f"{scheme}{separator}{path}"
    for prefix in (each for url in images_urls for each in (url, os.path.realpath(url))):
        key = key.removeprefix(unicodedata.normalize("NFC", prefix.rstrip("/")) + "/")
    return key.lstrip("/")


def _split_column(table: pa.Table, url: str, columns: LabelColumns) -> str | None:
    """The column that says which images are tested on: by its name, or else by its values; None if there is none."""
    label = find_column(table.column_names, next(iter(columns.label), None), LABEL_COLUMNS)
    others = [(name, column) for name, column in zip(table.column_names, table.columns, strict=True) if name != label]
    named = [name for name, _ in others if name.lower() == "split"]
    found = named or [name for name, column in others if _says_split(column)]
    if len(found) > 1:
        raise UsageError(
            f"The columns {', '.join(map(repr, found))} of the label file {url} all say which images are tested on; "
            "call the right one split."
        )
    if found and not named:
        _log.warning("The column %r of %s says which images are tested on.", found[0], url)
    for name in () if found else filter(is_part, dict(others)):
        _log.warning("The column %r of %s is not read; a column split with train and test would be.", name, url)
    return found[0] if found else None


def _folder_splits(keys: Texts, url: str) -> Texts:
    """The folders of training and test images that all keys are in; empty texts if they are in others, too."""
    tops = top_folders(keys)
    parts = parts_among(tops)
    if not parts or not {*tops} <= {*parts}:
        return np.full(len(keys), "", object)
    _log.warning("The folders %s in %s say which images are tested on.", first_names(parts), url)
    return np.array([top.lower() for top in tops], object)


def _says_split(column: pa.ChunkedArray) -> bool:
    """Whether all values of a column of texts are of training images or of test images, and some are of each."""
    texts = pa.string(), pa.large_string(), pa.string_view()
    is_text = column.type in texts or pa.types.is_dictionary(column.type)
    distinct = column.cast(pa.string()).unique() if is_text else ()
    values = {str(value).strip() for value in distinct[:_MOST_SPLITS]} - {""}
    return len(distinct) < _MOST_SPLITS and all(map(is_part, values)) and {True, False} <= set(map(is_training, values))


def _labels_by_folders(keys: Sequence[str], url: str) -> tuple[str, ...]:
    """The classes of a list of images alone, by the folders in it. Raises UsageError if there are none."""
    classes = read_folders(keys, url).classes
    if not any(classes):
        raise UsageError(
            f"The label file {url} has one column, such as {keys[0]!r}, with neither labels nor folders; give one with "
            "the path and the label of each image."
        )
    _log.warning("%s has no labels: the folders in it are the classes.", url)
    return classes


def _check_rows(table: LabelTable, group: str | None) -> None:
    """Raise UsageError if a key has several labels, or an image has no group although there are groups."""
    again = np.flatnonzero(table.keys[1:] == table.keys[:-1])
    if len(again):
        first = int(again[0])
        said = zip(table.labels, table.splits, table.groups, strict=True)
        one, other = (" ".join(filter(None, row)).replace(JOINED, " ") for row in islice(said, first, first + 2))
        raise UsageError(
            f"The label file {table.url} contradicts itself for {len(set(table.keys[again])):,} keys, such as "
            f"{table.keys[first]!r}, which is {one!r} and {other!r}; leave one row for each key."
        )
    num_missing = int(np.isin(table.groups.astype(str), list(NO_LABELS)).sum())
    if group is not None and num_missing:
        raise UsageError(
            f"{num_missing:,} of {len(table.keys):,} rows of {table.url} have no {group!r}, which --group-by needs; "
            "fill them in."
        )
