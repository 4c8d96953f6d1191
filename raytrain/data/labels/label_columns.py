"""The columns of a label file: which one holds what, their texts, and the classes in them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from raytrain.errors import UsageError, did_you_mean

pc: Any = pyarrow.compute  # whose functions are made at import
Texts = npt.NDArray[np.object_]

KEY_COLUMNS = ("key", "path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "category")
JOINED = "\x1f"  # joins the classes of an image that may have several

NO_LABELS = frozenset({"", "NaN", "nan", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL", "None"})
"""Texts that programs write in place of a missing value."""

_log = logging.getLogger("raytrain")
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


def find_column(present: Sequence[str], name: str | None, usual: Sequence[str]) -> str | None:
    """The column called ``name``, or else by one of the ``usual`` names in any case; None if there is none."""
    if name is not None:
        return name if name in present else None
    return next((each for wanted in usual for each in present if each.lower() == wanted), None)


def column_called(table: pa.Table, url: str, option: str, name: str | None, usual: Sequence[str] = ()) -> str:
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


def labels_of(table: pa.Table, url: str, columns: LabelColumns) -> list[str]:
    """The label of each row: a class, or the sorted classes joined by JOINED."""
    if len(columns.label) > 1:
        rows = zip(*(_flags(table, url, name) for name in columns.label), strict=True)
        return [JOINED.join(sorted(compress(columns.label, (flag == "1" for flag in row)))) for row in rows]
    name = column_called(
        table, url, "--label-column (or several, of 0 and 1)", next(iter(columns.label), None), LABEL_COLUMNS
    )
    labels: list[str] = texts_of(table, url, name, may_be_lists=True).to_pylist()
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
    column = texts_of(table, url, column_called(table, url, "--label-column", name))
    flags = np.array([_FLAGS.get(value.lower(), "") for value in column.to_pylist()], object)
    if wrong := int((flags == "").sum()):
        raise UsageError(
            f"{wrong:,} of {len(flags):,} rows of {url} have neither 0 nor 1 in the column {name!r}; correct them, or "
            "name one --label-column."
        )
    return flags


def classes_of(labels: Texts, columns: LabelColumns) -> tuple[str, ...] | None:
    """All classes if an image may have several of them, or none; None if it has one, or no label."""
    if len(columns.label) > 1:
        return columns.label
    if columns.separator is None:
        return None
    return tuple(sorted({name for label in set(labels) for name in label.split(JOINED)} - {""}))


def texts_of(table: pa.Table, url: str, name: str, *, may_be_lists: bool = False) -> pa.ChunkedArray:
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
