"""Label files: tables with a row for each image, of which columns say key and class, perhaps split and group."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from raytrain.data.labels.folders import first_names, is_part, is_training, parts_among, top_folders
from raytrain.data.labels.label_formats import read_table
from raytrain.data.labels.listing import check_folder
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError, did_you_mean
from raytrain.storage.store import Store

pc: Any = pyarrow.compute  # whose functions are made at import
Texts = npt.NDArray[np.object_]
Int64s = npt.NDArray[np.int64]

KEY_COLUMNS = ("key", "path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "category")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # label files of Hugging Face's image folders
JOINED = "\x1f"  # joins the classes of an image that may have several

NO_LABELS = frozenset({"", "NaN", "nan", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL", "None"})
"""Texts that programs write in place of a missing value."""

_log = logging.getLogger("raytrain")
_MOST_SPLITS = 20
_NUMBER = re.compile(r"-?\d+(\.0)?")
_FLAGS = {"0": "0", "1": "1", "0.0": "0", "1.0": "1", "false": "0", "true": "1"}


@dataclass(frozen=True)
class LabelColumns:
    """Which columns of a label file are read; None means one of the usual names."""

    key: str | None = None
    label: tuple[str, ...] = ()  # several are classes, with 0 or 1 for each image
    group: str | None = None  # None means that there are no groups
    separator: str | None = None  # between the classes of an image in its label; None if it has one class

    @property
    def key_names(self) -> frozenset[str]:
        """The names that the column of keys may have, in lower case."""
        return frozenset({self.key.lower()} if self.key else KEY_COLUMNS)

    @property
    def label_names(self) -> frozenset[str]:
        """The names that the column of labels may have, in lower case; none if each column is a class."""
        return frozenset(name.lower() for name in (self.label or LABEL_COLUMNS) if len(self.label) < 2)


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
        return np.full(len(keys), -1)


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
    keys = _text(table, url, _column(table, url, "--key-column", columns.key, KEY_COLUMNS))
    rows = pa.table(
        {
            "key": [normalized_key(key, images_urls) for key in keys.to_pylist()],
            "label": _labels(table, url, columns),
            "split": pc.utf8_lower(_text(table, url, split)) if (split := _split_column(table, url, columns)) else none,
            "group": _text(table, url, _column(table, url, "--group-by", columns.group)) if columns.group else none,
        }
    )
    if num_without := len(rows) - len(rows := rows.filter(pc.not_equal(rows["key"], ""))):
        _log.warning("%s rows of %s name no image, and are not used.", f"{num_without:,}", url)
    rows = rows.group_by(rows.column_names).aggregate([]).sort_by("key")  # a row that is there twice counts once
    keys, labels, splits, groups = (np.array(rows[name].to_pylist(), object) for name in rows.column_names)
    splits = splits if any(splits) else _folder_splits(keys, url)
    found = LabelTable(url, keys, labels, splits, groups, _classes(labels, columns))
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


def find_column(present: Sequence[str], name: str | None, usual: Sequence[str]) -> str | None:
    """The column called ``name``, or else by one of the ``usual`` names in any case; None if there is none."""
    if name is not None:
        return name if name in present else None
    return next((each for wanted in usual for each in present if each.lower() == wanted), None)


def _column(table: pa.Table, url: str, option: str, name: str | None, usual: Sequence[str] = ()) -> str:
    """The column called ``name``, or by one of the ``usual`` names. Raises UsageError if there is none."""
    found = find_column(table.column_names, name, usual)
    if found is None:
        wanted = (
            f"no column {name!r}{did_you_mean(name, table.column_names)}" if name else f"none of {', '.join(usual)}"
        )
        raise UsageError(
            f"The label file {url} has {wanted} among its columns {', '.join(table.column_names[:10])}; name the right "
            f"one with {option}."
        )
    return found


def _labels(table: pa.Table, url: str, columns: LabelColumns) -> list[str]:
    """The label of each row: a class, or the sorted classes joined by JOINED."""
    if len(columns.label) > 1:
        rows = zip(*(_flags(table, url, name) for name in columns.label), strict=True)
        return [JOINED.join(sorted(compress(columns.label, (flag == "1" for flag in row)))) for row in rows]
    name = _column(
        table, url, "--label-column (or several, of 0 and 1)", next(iter(columns.label), None), LABEL_COLUMNS
    )
    labels: list[str] = _text(table, url, name, may_be_lists=True).to_pylist()
    if columns.separator is None:
        return _single(labels, url)
    several = [_several(label, columns.separator) for label in labels]
    if len(several[0]) > 1 and all(len(each) == len(several[0]) and {*each} <= _FLAGS.keys() for each in several):
        raise UsageError(
            f"Each label in the column {name!r} of {url} has {len(several[0]):,} numbers 0 or 1, which do not say the "
            "classes that they stand for; write a column for each class, and name these with --label-column."
        )
    return [JOINED.join(sorted({*each})) for each in several]


def _several(label: str, separator: str) -> list[str]:
    """The classes in a label, which may be a list that ends in JOINED, or one as Python writes it."""
    if JOINED in label:
        return label.removesuffix(JOINED).split(JOINED)
    text = "" if label in NO_LABELS else label.strip("[]")
    return [name for part in text.split(separator) if (name := part.strip(" '\""))]


def _single(labels: Sequence[str], url: str) -> list[str]:
    """The names of classes, empty for texts that stand for none, which is told with their numbers."""
    if several := sum(label.count(JOINED) > 1 for label in labels):
        raise UsageError(
            f"{several:,} of {len(labels):,} rows of {url} have a list of several labels; give --label-separator , if "
            "images may have several classes, or leave one label for each."
        )
    labels = [label.removesuffix(JOINED) for label in labels]
    none, present = NO_LABELS, set(labels) - NO_LABELS
    if present and all(_NUMBER.fullmatch(label) for label in present):
        labels = [label.removesuffix(".0") for label in labels]  # as pandas writes integers with gaps
        none |= {"-1"}
    if found := Counter(label for label in labels if label and label in none):
        texts = ", ".join(f"{count:,} {text}" for text, count in found.items())
        _log.warning("%s rows of %s have no label (%s), and are not used.", f"{found.total():,}", url, texts)
    return ["" if label in none else label for label in labels]


def _flags(table: pa.Table, url: str, name: str) -> Texts:
    """A column of 0 and 1, as such texts. Raises UsageError if there is no such column, or it holds anything else."""
    column = _text(table, url, _column(table, url, "--label-column", name))
    flags = np.array([_FLAGS.get(value.lower(), "") for value in column.to_pylist()], object)
    if wrong := int((flags == "").sum()):
        raise UsageError(
            f"{wrong:,} of {len(flags):,} rows of {url} have neither 0 nor 1 in the column {name!r}; correct them, or "
            "name one --label-column."
        )
    return flags


def _classes(labels: Texts, columns: LabelColumns) -> tuple[str, ...] | None:
    if len(columns.label) > 1:
        return columns.label
    if columns.separator is None:
        return None
    return tuple(sorted({name for label in set(labels) for name in label.split(JOINED)} - {""}))


def _text(table: pa.Table, url: str, name: str, *, may_be_lists: bool = False) -> pa.ChunkedArray:
    """A column as text without blanks around it, empty if a value is missing. Raises UsageError if it has no text.

    If it ``may_be_lists``, each text of a list ends in JOINED.
    """
    if table.column_names.count(name) > 1:
        raise UsageError(f"The label file {url} has {table.column_names.count(name)} columns {name!r}; rename one.")
    column = table[name]
    try:
        if may_be_lists and _is_list(column.type):
            lists = column.cast(pa.list_(pa.string())).to_pylist()
            return pa.chunked_array(
                [["".join(f"{each.strip()}{JOINED}" for each in row or () if each) for row in lists]]
            )
        text = as_text(column)
    except pa.ArrowNotImplementedError:
        raise UsageError(
            f"The column {name!r} of {url} holds {_kind(column.type)}, and one text or number per row is expected; an "
            "image with several classes has a column of 0 and 1 for each (--label-column), or one text such as cat|dog "
            "(--label-separator)."
        ) from None
    except pa.ArrowInvalid:
        raise UsageError(f"The column {name!r} of {url} holds bytes that are not text in UTF-8; correct it.") from None
    return pc.utf8_trim_whitespace(text.fill_null(""))


def as_text(column: Any) -> Any:
    """An array of Arrow, of texts. Raises pa.ArrowNotImplementedError or pa.ArrowInvalid if its values are none."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string())


def _is_list(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type)


def _kind(type: pa.DataType) -> str:
    return "lists" if _is_list(type) else "records" if pa.types.is_struct(type) else f"values of type {type}"


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
