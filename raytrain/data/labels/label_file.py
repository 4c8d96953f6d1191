"""Label files, whose rows say key and class of each image, perhaps split and group; from opening to classes.

A label file goes this way: :func:`read_table` opens it as a table of texts; :func:`label_table` finds the columns,
whose names and meaning people write in many ways; :func:`labels_of` makes classes of the texts in the column of
labels; and :meth:`LabelTable.rows_of` finds the row of each image, whose key may lack folders or suffix.

Several classes of one image are one text, sorted and joined by ``JOINED``, until labels become numbers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from raytrain.data.labels.folders import BOOLEANS, composed, read_folders, top_folders
from raytrain.data.labels.label_formats import KEY_COLUMNS, LABEL_COLUMNS, METADATA, read_table
from raytrain.data.labels.listing import check_folder, first_names
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import Part, is_held_out, is_part, is_training, parts_among
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError, did_you_mean, format_count
from raytrain.storage.store import Store

pc: Any = pyarrow.compute  # whose functions are made at import
Texts = npt.NDArray[np.object_]

JOINED = "\x1f"  # joins the classes of an image that may have several

NO_LABELS = frozenset({"", "NaN", "nan", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL", "None"})
"""Texts that programs write in place of a missing value."""

MOST_SPLITS = 20  # a column with as many different texts is about something else than splits
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())

_log = logging.getLogger("raytrain")
_NAMES_OF_SPLITS = ("subset", "partition", "phase", "usage", "ml_use")  # read only if their values are train and test
_NUMBER = re.compile(r"-?\d+(\.0)?")
_FLAGS = {"0": "0", "1": "1", "0.0": "0", "1.0": "1", "false": "0", "true": "1"}


@dataclass(frozen=True)
class LabelColumns:
    """Which columns of a label file are read; None means one of the usual names."""

    key: str | None = None
    label: tuple[str, ...] = ()  # several are classes, with 0 or 1 for each image
    group: str | None = None  # None means that there are no groups
    separator: str | None = None  # between the classes of an image in its label; None if it has one class


@dataclass(frozen=True, eq=False)
class LabelTable:
    """The N rows of a label file, sorted by key, each key once."""

    url: str
    keys: Texts  # (N,), paths relative to the folder of the images, or below it as a URL
    labels: Texts  # (N,), names of classes; empty if an image has none; several are joined by JOINED
    splits: Texts  # (N,), in lower case; empty if no column says which images are held out
    groups: Texts  # (N,), empty if there are no groups
    classes: tuple[str, ...] | None = None
    """All classes if an image may have several of them, or none; None if it has one, or no label."""
    images: Manifest | None = None
    """The images whose names the rows are of, if those were read."""
    pattern_digest: str | None = None
    """Stands for the rows if they were found by a pattern."""

    def with_parts(self, held_out: Mapping[Part, LabelTable]) -> LabelTable:
        """Return one table of these rows, for training, and of the rows of ``held_out``, each for its part.

        Raises UsageError if an image is in two tables, or a table has splits of its own.
        """
        # Each table is about one part, and no image may be in two.
        tables: dict[Part, LabelTable] = {"train": self, **held_out}
        for part, table in tables.items():
            fits_part = is_training if part == "train" else is_held_out
            if any(table.splits) and not all(map(fits_part, table.splits)):
                raise UsageError(f"{table.url} says itself which images are held out; give it alone, with --labels.")
        for first, second in combinations(tables.values(), 2):
            if len(shared := np.intersect1d(first.keys, second.keys)):
                raise UsageError(
                    f"{first.url} and {second.url} both have {format_count(len(shared), 'image')}, such as "
                    f"{shared[0]!r}; leave each in one."
                )

        # The rows of all tables, sorted by key, with the names of the parts as their splits.
        keys, labels, groups = (
            np.concatenate([getattr(table, name) for table in tables.values()]) for name in ("keys", "labels", "groups")
        )
        splits = np.repeat(np.array([*tables], object), [len(table.keys) for table in tables.values()])
        order = keys.argsort()
        classes = self.classes
        if classes is not None:
            classes = tuple(dict.fromkeys(name for table in tables.values() for name in table.classes or ()))
        url = " and ".join(table.url for table in tables.values())
        return LabelTable(url, keys[order], labels[order], splits[order], groups[order], classes)

    @property
    def digest(self) -> str:
        """SHA-256 of all rows, as hexadecimal digits: the same for the same rows in any order and format."""
        if self.pattern_digest is not None:
            return self.pattern_digest
        columns = (self.keys, self.labels, self.splits, self.groups)
        return hashlib.sha256("\1".join("\0".join(column) for column in columns).encode()).hexdigest()

    def rows_of(self, images: Manifest) -> Int64s:
        """Return the row of each image, (len(images),); -1 if it has none.

        All keys are compared in the same form: the first of those below in which at least one image has a row.
        """
        keys = [comparable_key(str(key)) for key in images.keys.to_pylist()]

        def rows_in(row_of: dict[str, int], *forms: Callable[[str], str]) -> Int64s | None:
            """Return the rows by the first of ``forms`` in which a key of the images is in ``row_of``; else None."""
            for form in forms:
                rows = np.array([row_of.get(form(key), -1) for key in keys], np.int64)
                if (rows >= 0).any():
                    return rows
            return None

        # Many tables have keys without suffixes, or without folders: try these forms after the whole key.
        by_key = {key: row for row, key in enumerate(self.keys)}
        rows = rows_in(by_key, str, _stem, posixpath.basename, lambda key: _stem(posixpath.basename(key)))
        if rows is not None:
            return rows

        # Or keys are paths on another machine, such as C:/photos/cat/1.jpg, where the folder of the images has the same
        # name: then compare what comes after that name, unless two keys are alike there.
        folder = posixpath.basename(images.url.rstrip("/"))
        paths = [f"/{key}".partition(f"/{folder}/")[2] for key in self.keys]  # empty if the folder is not in the key
        by_path = {path: row for row, path in enumerate(paths) if path}
        is_unique = len(by_path) == sum(path != "" for path in paths)
        rows = rows_in(by_path, str, _stem) if is_unique else None
        return np.full(len(keys), -1) if rows is None else rows


def _stem(key: str) -> str:
    """Return a key without the suffix of its file."""
    return posixpath.splitext(key)[0]


def read_label_file(
    url: str, columns: LabelColumns, images_urls: Sequence[str] = (), option: str = "--labels"
) -> LabelTable:
    """Read a file, or an object of a bucket, that ends in .csv, .tsv, .txt, .json, .jsonl or .parquet.

    Keys may be paths relative to the images, or start with one of ``images_urls``. ``option`` names the file.

    Raises:
        StorageError: the file cannot be read.
        UsageError: the file contains no table, lacks a column, or gives the same key different labels.

    Example::

        table = read_label_file("s3://photos/labels.csv", LabelColumns(label=("species",)))
    """
    return label_table(_open_table(url, columns, option), url, columns, images_urls)


def own_label_table(store: Store, columns: LabelColumns | None = None) -> LabelTable | None:
    """Read the label file that lies beside the images, as in Hugging Face's image folders.

    Return None if there is none, or it has no column of labels. Log what was found. Raises the same as
    :func:`read_label_file`.
    """
    columns = columns or LabelColumns()
    check_folder(store)
    name = next(filter(store.exists, METADATA), None)
    if name is None:
        return None
    url = f"{store.url.rstrip('/')}/{name}"
    table = _open_table(url, columns)
    if not columns.label and find_column(table.column_names, None, LABEL_COLUMNS) is None:
        sentence = "%s has no column of labels among %s, and is not read; --labels and --label-column name one."
        _log.warning(sentence, url, ", ".join(table.column_names[:10]))
        return None
    _log.warning("The classes are those in %s, whatever folders the images are in.", url)
    return label_table(table, url, columns, [store.url])


def _open_table(url: str, columns: LabelColumns, option: str | None = None) -> pa.Table:
    """Read the table in a label file, whose columns of keys and labels may have the names that ``columns`` allows.

    ``option`` names the file in error sentences.
    """
    # With several columns of labels, these hold 0 or 1, which are no numbers of classes.
    key_names = {columns.key.lower()} if columns.key else set(KEY_COLUMNS)
    label_names = {name.lower() for name in (columns.label or LABEL_COLUMNS) if len(columns.label) < 2}
    return read_table(url, key_names, label_names, option)


def label_table(table: pa.Table, url: str, columns: LabelColumns, images_urls: Sequence[str]) -> LabelTable:
    """Return the rows of a table of the label file ``url``, and log what is not used of it.

    Raises UsageError as :func:`read_label_file` does.
    """
    if not len(table):
        raise UsageError(f"The label file {url} has no row; it must have one for each image.")
    key_texts = texts_of(table, url, column_called(table, url, "--key-column", columns.key, KEY_COLUMNS))
    keys = [normalized_key(key, images_urls) for key in key_texts.to_pylist()]
    split = _split_column(table, url, columns)
    group = columns.group and column_called(table, url, "--group-by", columns.group)

    # A list of images has no column of labels: the folders in it are the labels.
    if len(table.column_names) == 1 and not columns.label:
        labels = list(read_folders(keys, url).classes)
        if not any(labels):
            raise UsageError(
                f"The label file {url} has one column, such as {keys[0]!r}, with neither labels nor folders; give one "
                "with the path and the label of each image."
            )
        _log.warning("%s has no labels: the folders in it are the classes.", url)
    else:
        labels = labels_of(table, url, columns)

    # Drop rows without a key, and repeated rows.
    empty = [""] * len(table)
    rows = pa.table(
        {
            "key": keys,
            "label": labels,
            "split": pc.utf8_lower(texts_of(table, url, split)) if split else empty,
            "group": texts_of(table, url, group) if group else empty,
        }
    )
    rows = rows.filter(pc.not_equal(rows["key"], ""))
    if num_without_key := len(table) - len(rows):
        _log.warning("Rows of %s that name no image are not used: %s.", url, f"{num_without_key:,}")
    if not len(rows):
        raise UsageError(f"No row of the label file {url} names an image; its keys are empty.")
    rows = rows.group_by(rows.column_names).aggregate([]).sort_by("key")
    keys, labels, splits, groups = (np.array(rows[name].to_pylist(), object) for name in rows.column_names)

    # Without a column of splits, the folders may say the split, if they are called train, test and so on for all keys.
    if not any(splits):
        tops = top_folders(keys)
        parts = parts_among(tops)
        if parts and {*tops} <= {*parts}:
            _log.warning(
                "The folders %s in %s say the split into training and held-out images.", first_names(parts), url
            )
            splits = np.array([top.lower() for top in tops], object)
        else:
            splits = np.full(len(keys), "", object)

    # Classes are listed only where an image may have several of them, or none.
    classes: tuple[str, ...] | None = None
    if len(columns.label) > 1:
        classes = tuple(map(composed, columns.label))
    elif columns.separator is not None:
        classes = tuple(sorted({name for label in set(labels) for name in label.split(JOINED)} - {""}))
    label_rows = LabelTable(url, keys, labels, splits, groups, classes)
    _check_rows(label_rows, columns.group)
    return label_rows


def comparable_key(key: str) -> str:
    """Return a key in the form in which keys are compared: composed, and with slashes where Windows writes others.

    >>> comparable_key("data/train\\\\cat\\\\1.jpg")
    'data/train/cat/1.jpg'
    """
    return composed(key).replace("\\", "/")


def normalized_key(key: str, images_urls: Sequence[str]) -> str:
    """Return a key as a path below one of ``images_urls``: ``./a//b.png`` and the whole URL become ``a/b.png``.

    The key of an image elsewhere stays a whole URL, or becomes a path without the slash at its start.
    """
    key = comparable_key(key.strip()).removeprefix("file://")
    scheme, separator, path = key.rpartition("://")
    path = posixpath.normpath(path).removeprefix("./") if path else ""
    key = f"{scheme}{separator}{path}"
    for prefix in (form for url in images_urls for form in (url, os.path.realpath(url))):
        key = key.removeprefix(composed(prefix.rstrip("/")) + "/")
    return key.lstrip("/")


def _split_column(table: pa.Table, url: str, columns: LabelColumns) -> str | None:
    """Return the column that says which images are held out: split, or one with values such as train and test.

    Return None without such a column; raise UsageError if there are several. Log columns that look like one but are
    not read.
    """
    label = find_column(table.column_names, next(iter(columns.label), None), LABEL_COLUMNS)
    key = find_column(table.column_names, columns.key, KEY_COLUMNS)
    other_columns = [
        (name, column) for name, column in zip(table.column_names, table.columns, strict=True) if name != label
    ]

    # A column called split is the one. Otherwise, look for one with few different values, some of which mean training
    # images and some held-out ones. Up to half of the values may mean neither, such as extra or unassigned: rows with
    # these are counted, and not used. In the column of keys, all must, because names of files may be anything.
    named_split = [name for name, _ in other_columns if name.lower() == "split"]
    split_columns, doubtful = list(named_split), list[str]()
    for name, column in () if named_split else other_columns:
        is_text = column.type in TEXT_TYPES or pa.types.is_dictionary(column.type)
        distinct = column.cast(pa.string()).unique() if is_text else ()
        if len(distinct) >= MOST_SPLITS:
            continue
        values = {str(value).strip() for value in distinct} - NO_LABELS
        parts = set(parts_among(values))
        if not parts:
            continue
        if parts == values or (name != key and 2 * len(parts) >= len(values)):
            split_columns.append(name)
        elif name != key:
            doubtful.append(name)
    if len(split_columns) > 1:
        raise UsageError(
            f"The columns {', '.join(map(repr, split_columns))} of the label file {url} all say the split; "
            "call the right one split."
        )
    if split_columns:
        if not named_split:
            _log.warning("The column %r of %s says the split into training and held-out images.", split_columns[0], url)
        return split_columns[0]

    # Without such a column, tell whoever meant one to be it that it is not read.
    for name, _ in other_columns:
        if is_part(name) or name.lower() in _NAMES_OF_SPLITS or name in doubtful:
            _log.warning(
                "The column %r of %s is not read; a column split with train, validation and test would be.", name, url
            )
    return None


def labels_of(table: pa.Table, url: str, columns: LabelColumns) -> list[str]:
    """Return the label of each row: a class, or sorted classes joined by JOINED; empty if it has none.

    Raises UsageError if a column of labels is missing, or its values are not of the kind that ``columns`` asks for.
    """
    # A column of 0 and 1 for each class.
    if len(columns.label) > 1:
        name, count = Counter(map(composed, columns.label)).most_common(1)[0]
        if count > 1:
            raise UsageError(f"--label-column names {name!r} {count} times; name each class once.")
        flags_of_classes: list[Texts] = []
        for name in columns.label:
            texts = texts_of(table, url, column_called(table, url, "--label-column", name)).to_pylist()
            flags = np.array([_FLAGS.get(value.lower(), "") for value in texts], object)
            if wrong := int((flags == "").sum()):
                raise UsageError(
                    f"{wrong:,} of {len(flags):,} rows of {url} have neither 0 nor 1 in the column {name!r}; correct "
                    "them, or name one --label-column."
                )
            flags_of_classes.append(flags)
        rows = zip(*flags_of_classes, strict=True)
        classes = list(map(composed, columns.label))
        return [JOINED.join(sorted(compress(classes, (flag == "1" for flag in row)))) for row in rows]

    # One column, with one class for each image.
    option = "--label-column (or several, of 0 and 1)"
    name = column_called(table, url, option, next(iter(columns.label), None), LABEL_COLUMNS)
    labels: list[str] = texts_of(table, url, name, may_be_lists=True).to_pylist()
    if columns.separator is None:
        return _single_labels(labels, url)

    # One column, with several classes: a list, or a text that may look like a list of Python.
    several: list[list[str]] = []
    for label in labels:
        if JOINED in label:
            several.append(label.removesuffix(JOINED).split(JOINED))
        else:
            text = "" if label in NO_LABELS else label.strip("[]")
            several.append([name for part in text.split(columns.separator) if (name := part.strip(" '\""))])
    if len(several[0]) > 1 and all(len(names) == len(several[0]) and {*names} <= _FLAGS.keys() for names in several):
        raise UsageError(
            f"Each label in the column {name!r} of {url} has {len(several[0]):,} numbers 0 or 1, which do not say the "
            "classes that they stand for; write a column for each class, and name these with --label-column."
        )
    return [JOINED.join(sorted(set(names))) for names in several]


def _single_labels(labels: Sequence[str], url: str) -> list[str]:
    """Return the class in each label, empty for a text that means "no label"; log how many of these there are.

    Raises UsageError if a label is a list of several.
    """
    # Each item of a list ends in JOINED (see texts_of), and a list of one item is as good as a text.
    if several := sum(label.count(JOINED) > 1 for label in labels):
        raise UsageError(
            f"{several:,} of {len(labels):,} rows of {url} have a list of several labels; give --label-separator , if "
            "images may have several classes, or leave one label for each."
        )

    # Among classes that are all numbers, -1 means "no label", too; among other classes it may be one.
    labels = [label.removesuffix(JOINED) for label in labels]
    no_labels, present = NO_LABELS, set(labels) - NO_LABELS
    if present and all(_NUMBER.fullmatch(label) for label in present):
        labels = [label.removesuffix(".0") for label in labels]  # as pandas writes integers with gaps
        no_labels |= {"-1"}
    if counts := Counter(label or "empty" for label in labels if label in no_labels):
        counted_texts = ", ".join(f"{count:,} {text}" for text, count in counts.items())
        _log.warning("Rows of %s without a label are not used: %s (%s).", url, f"{counts.total():,}", counted_texts)
    return ["" if label in no_labels else label for label in labels]


def column_called(table: pa.Table, url: str, option: str, name: str | None, usual: Sequence[str] = ()) -> str:
    """Return the column called ``name``, or by one of the ``usual`` names; log if several have a usual name.

    Raises UsageError, which tells the user to give ``option``, if there is none.
    """
    column = find_column(table.column_names, name, usual)
    if name is None and len(candidates := [column for column in table.column_names if column.lower() in usual]) > 1:
        names = ", ".join(map(repr, candidates))
        _log.warning("Of the columns %s of %s, %r is read; %s names another.", names, url, column, option.split(" ")[0])
    if column is None:
        lacking = (
            f"no column {name!r}{did_you_mean(name, table.column_names)}" if name else f"none of {', '.join(usual)}"
        )
        raise UsageError(
            f"The label file {url} has {lacking} among its columns {', '.join(table.column_names[:10])}; name the "
            f"right one with {option}."
        )
    return column


def find_column(present: Sequence[str], name: str | None, usual: Sequence[str]) -> str | None:
    """Return the column called ``name``; without a name, the one with the first of the ``usual`` names, in any case.

    Return None if there is none.

    >>> find_column(["Path", "Class"], None, LABEL_COLUMNS)
    'Class'
    """
    if name is not None:
        return next((column for column in present if composed(column) == composed(name)), None)
    return next((column for wanted in usual for column in present if column.lower() == wanted), None)


def texts_of(table: pa.Table, url: str, name: str, *, may_be_lists: bool = False) -> pa.ChunkedArray:
    """Return a column as composed texts without surrounding blanks; a missing value is empty.

    If it ``may_be_lists``, a list becomes one text, in which each item ends in JOINED. Raises UsageError if the values
    cannot be text.
    """
    if table.column_names.count(name) > 1:
        raise UsageError(f"The label file {url} has {table.column_names.count(name)} columns {name!r}; rename one.")
    # Arrow makes texts of numbers and booleans. Lists and records need words of our own.
    column = table[name]
    kinds_of_lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    are_lists = any(is_kind(column.type) for is_kind in kinds_of_lists)
    try:
        if may_be_lists and are_lists:
            lists = column.cast(pa.list_(pa.string())).to_pylist()
            return pa.chunked_array(
                [["".join(f"{composed(text.strip())}{JOINED}" for text in row or () if text) for row in lists]]
            )
        text = as_text(column)
    except pa.ArrowNotImplementedError:
        records = "records" if pa.types.is_struct(column.type) else f"values of type {column.type}"
        raise UsageError(
            f"The column {name!r} of {url} holds {'lists' if are_lists else records}, and one text or number per row "
            "is expected; an image with several classes has a column of 0 and 1 for each (--label-column), or one text "
            "such as cat|dog (--label-separator)."
        ) from None
    except pa.ArrowInvalid:
        raise UsageError(f"The column {name!r} of {url} holds bytes that are not text in UTF-8; correct it.") from None

    # Make one text of what programs write in several ways: é as one character or two, and True, TRUE or true.
    text = pc.utf8_normalize(pc.utf8_trim_whitespace(text.fill_null("")), form="NFC")
    is_flag = pc.is_in(text, pa.array(BOOLEANS))
    if pc.any(is_flag).as_py() and pc.all(pc.or_(is_flag, pc.is_in(text, pa.array(sorted(NO_LABELS))))).as_py():
        text = pc.if_else(is_flag, pc.utf8_lower(text), text)
    return text


def as_text(column: Any) -> Any:
    """Return an Arrow array as texts; raise pa.ArrowNotImplementedError or pa.ArrowInvalid if that is impossible."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string())


def _check_rows(table: LabelTable, group: str | None) -> None:
    """Raise UsageError if a key has several labels, or an image has no group although there are groups."""
    # Rows are sorted by key, and equal rows have been merged: a key that comes again has another label.
    again = np.flatnonzero(table.keys[1:] == table.keys[:-1])
    if len(again):
        first = int(again[0])
        rows = zip(table.labels, table.splits, table.groups, strict=True)
        first_row, second_row = (
            " ".join(filter(None, row)).replace(JOINED, " ") for row in islice(rows, first, first + 2)
        )
        raise UsageError(
            f"The label file {table.url} contradicts itself for {format_count(len(set(table.keys[again])), 'key')}, "
            f"such as {table.keys[first]!r}, which is {first_row!r} and {second_row!r}; leave one row for each key."
        )

    # Images without a group could be on both sides of a split.
    num_missing = int(np.isin(table.groups.astype(str), list(NO_LABELS)).sum())
    if group is not None and num_missing:
        raise UsageError(
            f"{num_missing:,} of {len(table.keys):,} rows of {table.url} have no {group!r}, which --group-by needs; "
            "fill them in."
        )
