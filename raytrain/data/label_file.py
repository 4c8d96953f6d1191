"""Label files: a CSV or Parquet table with a row for each image: its key, its class, perhaps its split and group."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet as pq

from raytrain.data.manifest import Manifest
from raytrain.errors import UsageError, did_you_mean
from raytrain.storage.open import read_input

pc: Any = pyarrow.compute  # whose functions are made at import
Texts = npt.NDArray[np.object_]
Int64s = npt.NDArray[np.int64]

KEY_COLUMNS = ("key", "path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "category")
JOINED = "\x1f"
"""Joins the classes of an image that may have several."""

_SPLIT_COLUMN = "split"
_FLAGS = {"0": "0", "1": "1", "0.0": "0", "1.0": "1", "false": "0", "true": "1"}


@dataclass(frozen=True)
class LabelColumns:
    """Which columns of a label file are read; None means one of the usual names."""

    key: str | None = None
    label: tuple[str, ...] = ()
    """Several are classes, with 0 or 1 for each image."""
    group: str | None = None
    """None means that there are no groups."""
    separator: str | None = None
    """Between the classes of an image in its label; None if it has one class."""


@dataclass(frozen=True, eq=False)
class LabelTable:
    """The N rows of a label file, sorted by key, each key once."""

    url: str
    keys: Texts  # (N,), paths relative to the folder of the images, or below it as a URL
    labels: Texts  # (N,), names of classes; empty if an image has none; several are joined by JOINED
    splits: Texts  # (N,), in lower case; empty if the file has no column ``split``
    groups: Texts  # (N,), empty if there are no groups
    classes: tuple[str, ...] | None = None
    """All classes if an image may have several of them, or none; None if it has one, or no label."""

    @property
    def digest(self) -> str:
        """SHA-256 of all rows, as hexadecimal digits: the same for the same rows in any order and format."""
        columns = (self.keys, self.labels, self.splits, self.groups)
        return hashlib.sha256("\1".join("\0".join(column) for column in columns).encode()).hexdigest()

    @property
    def has_splits(self) -> bool:
        """Whether the file says which images are for training and which for testing."""
        return bool((self.splits != "").any())

    def rows_of(self, images: Manifest) -> Int64s:
        """The row of each image, (len(images),); -1 if it has none."""
        prefix = images.url.rstrip("/") + "/"
        row_of = {key.removeprefix(prefix).removeprefix("./"): row for row, key in enumerate(self.keys)}
        return np.array([row_of.get(key, -1) for key in images.keys.to_pylist()], np.int64)


def read_label_file(url: str, columns: LabelColumns) -> LabelTable:
    """Read a CSV or Parquet file, or ``s3://`` object.

    Raises:
        StorageError: it cannot be read.
        UsageError: it is no such table, lacks a column, or gives the same key different labels.
    """
    table = _read_table(url)
    rows = pa.table(
        {
            "key": _column(table, url, "--key-column", columns.key, KEY_COLUMNS),
            "label": _labels(table, url, columns),
            "split": pc.utf8_lower(_text(table, _SPLIT_COLUMN)),
            "group": _column(table, url, "--group-by", columns.group) if columns.group else _text(table, ""),
        }
    )
    rows = rows.group_by(rows.column_names).aggregate([]).sort_by("key")  # a row that is there twice counts once
    keys, labels, splits, groups = (np.array(rows[name].to_pylist(), object) for name in rows.column_names)
    found = LabelTable(url, keys, labels, splits, groups, _classes(labels, columns))
    _check_rows(found, columns.group)
    return found


def _read_table(url: str) -> pa.Table:
    content = read_input(url)
    try:
        if url.endswith(".parquet"):
            return pq.read_table(pa.BufferReader(content))
        if not url.endswith(".csv"):
            raise UsageError(f"The label file is {url!r}; its name must end in .csv or .parquet.")
        names = pyarrow.csv.open_csv(io.BytesIO(content)).schema.names
        as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))  # 007 is not 7
        return pyarrow.csv.read_csv(io.BytesIO(content), convert_options=as_text)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(f"The label file {url} cannot be read as a table ({reason}); correct the file.") from None


def _column(table: pa.Table, url: str, option: str, name: str | None, usual: Sequence[str] = ()) -> pa.ChunkedArray:
    """The column called ``name``, or by one of the ``usual`` names, as text. Raises UsageError if there is none."""
    found = next((each for each in ([name] if name else usual) if each in table.column_names), None)
    if found is None:
        wanted = (
            f"no column {name!r}{did_you_mean(name, table.column_names)}" if name else f"none of {', '.join(usual)}"
        )
        raise UsageError(
            f"The label file {url} has {wanted} among its columns {', '.join(table.column_names[:10])}; name the right "
            f"one with {option}."
        )
    return _text(table, found)


def _labels(table: pa.Table, url: str, columns: LabelColumns) -> pa.ChunkedArray:
    """The label of each row: a class, or the sorted classes joined by JOINED."""
    if len(columns.label) > 1:
        return _joined([_flags(table, url, name) for name in columns.label], columns.label)
    labels = _column(table, url, "--label-column", next(iter(columns.label), None), LABEL_COLUMNS)
    if columns.separator is None:
        return labels
    names = ({name.strip() for name in label.split(columns.separator)} for label in labels.to_pylist())
    return pa.chunked_array([pa.array([JOINED.join(sorted(each - {""})) for each in names], pa.string())])


def _flags(table: pa.Table, url: str, name: str) -> Texts:
    """A column of 0 and 1, as such texts. Raises UsageError if there is no such column, or it holds anything else."""
    column = _column(table, url, "--label-column", name)
    flags = np.array([_FLAGS.get(value.lower(), "") for value in column.to_pylist()], object)
    if wrong := int((flags == "").sum()):
        raise UsageError(
            f"{wrong:,} of {len(flags):,} rows of {url} have neither 0 nor 1 in the column {name!r}; correct them, or "
            "name one --label-column."
        )
    return flags


def _joined(flags: Sequence[Texts], names: Sequence[str]) -> pa.ChunkedArray:
    rows = zip(*flags, strict=True)
    joined = [JOINED.join(sorted(compress(names, (flag == "1" for flag in row)))) for row in rows]
    return pa.chunked_array([pa.array(joined, pa.string())])


def _classes(labels: Texts, columns: LabelColumns) -> tuple[str, ...] | None:
    if len(columns.label) > 1:
        return columns.label
    if columns.separator is None:
        return None
    return tuple(sorted({name for label in set(labels) for name in label.split(JOINED)} - {""}))


def _text(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column as text, empty if a value, or the column, is missing."""
    if name not in table.column_names:
        return pa.chunked_array([pa.array([""] * len(table), pa.string())])
    return table[name].cast(pa.string()).fill_null("")


def _check_rows(table: LabelTable, group: str | None) -> None:
    """Raise UsageError if a key has several labels, or an image has no group although there are groups."""
    again = np.flatnonzero(table.keys[1:] == table.keys[:-1])
    if len(again):
        first = int(again[0])
        one, other = (" ".join(each for each in row if each) for row in _described(table, first))
        raise UsageError(
            f"The label file {table.url} contradicts itself for {len(set(table.keys[again])):,} keys, such as "
            f"{table.keys[first]!r}, which is {one!r} and {other!r}; leave one row for each key."
        )
    num_missing = int((table.groups == "").sum())
    if group is not None and num_missing:
        raise UsageError(
            f"{num_missing:,} of {len(table.keys):,} rows of {table.url} have no {group!r}, which --group-by needs; "
            "fill them in."
        )


def _described(table: LabelTable, row: int) -> list[tuple[str, str, str]]:
    """What is said of the image of a row, and of the next row."""
    labels = [label.replace(JOINED, " ") for label in table.labels[row : row + 2]]
    return [(label, table.splits[each], table.groups[each]) for each, label in enumerate(labels, row)]
