"""Label files: a CSV or Parquet table with a row for each image: its key, its class, perhaps its split and group."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet as pq

from raytrain.data.manifest import Manifest
from raytrain.errors import UsageError, did_you_mean
from raytrain.storage.input_file import read_input

pc: Any = pyarrow.compute  # whose functions are made at import
Texts = npt.NDArray[np.object_]
Int64s = npt.NDArray[np.int64]

KEY_COLUMNS = ("key", "path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "category")
_SPLIT_COLUMN = "split"


@dataclass(frozen=True)
class LabelColumns:
    """Which columns of a label file are read; None means one of the usual names."""

    key: str | None = None
    label: str | None = None
    group: str | None = None
    """None means that there are no groups."""


@dataclass(frozen=True, eq=False)
class LabelTable:
    """The N rows of a label file, sorted by key, each key once."""

    url: str
    keys: Texts  # (N,), paths relative to the folder of the images, or below it as a URL
    labels: Texts  # (N,), names of classes; empty if an image has none
    splits: Texts  # (N,), in lower case; empty if the file has no column ``split``
    groups: Texts  # (N,), empty if there are no groups

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
            "label": _column(table, url, "--label-column", columns.label, LABEL_COLUMNS),
            "split": pc.utf8_lower(_text(table, _SPLIT_COLUMN)),
            "group": _column(table, url, "--group-by", columns.group) if columns.group else _text(table, ""),
        }
    )
    rows = rows.group_by(rows.column_names).aggregate([]).sort_by("key")  # a row that is there twice counts once
    found = LabelTable(url, *(np.array(rows[name].to_pylist(), object) for name in rows.column_names))
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
    return [(table.labels[each], table.splits[each], table.groups[each]) for each in (row, row + 1)]
