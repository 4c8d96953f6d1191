"""Columns of a label file, which people call by many names, and their values as texts and classes.

The order is that in which a table is read. :func:`column_called` and :func:`split_column` find the columns, by their
names or by their values; :func:`texts_of` makes texts of one; and :func:`labels_of` makes classes of the texts in the
column, or columns, of labels. Archives with columns are read by the same rules.

Several classes of one image are one text, sorted and joined by ``JOINED``, until labels become numbers.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from raytrain.data.labels.class_names import BOOLEANS, composed
from raytrain.data.labels.label_formats import KEY_COLUMNS, LABEL_COLUMNS
from raytrain.data.labels.label_json import parsed_text
from raytrain.data.labels.part_names import is_part, parts_among
from raytrain.errors import UsageError, did_you_mean

pc: Any = pyarrow.compute  # whose functions are made at import
Texts = npt.NDArray[np.object_]

JOINED = "\x1f"  # joins the classes of an image that may have several

_ERRORS_OF_EXCEL = {"#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NULL!", "#NUM!"}
NO_LABELS = frozenset({"", "NaN", "nan", "<NA>", "N/A", "n/a", "null", "NULL", "None", *_ERRORS_OF_EXCEL})
"""Texts that programs write in place of a missing value."""

ONE_CLASS_EACH = "pack the images with these, and train on the shards without --labels"
"""What to do if an image has one class, and a table has a column of 0 and 1 for each."""

_MOST_SHOWN = 10  # columns of 0 and 1 in a sentence
MOST_SPLITS = 20  # a column with as many different texts is about something else than splits
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())

_log = logging.getLogger("raytrain")
# Read only if their values are train and test.
_NAMES_OF_SPLITS = frozenset({"subset", "partition", "phase", "usage", "ml_use", "set", "fold", "kfold"})
_NUMBER = re.compile(r"-?\d+(\.0+)?")
_ZEROS = re.compile(r"\.0+$")
_FLAGS = {"0": "0", "1": "1", "0.0": "0", "1.0": "1", "false": "0", "true": "1"}
_SIGNS = {"-1": "0", "1": "1", "-1.0": "0", "1.0": "1"}


@dataclass(frozen=True)
class LabelColumns:
    """Names of the columns of a label file that are read; None means a column with one of the usual names."""

    key: str | None = None
    label: tuple[str, ...] = ()  # several are classes, with 0 or 1 for each image
    group: str | None = None  # None means that there are no groups
    separator: str | None = None  # between the classes of an image in its label; None if it has one class


def column_called(
    names: Sequence[str],
    url: str,
    option: str,
    name: str | None,
    usual: Sequence[str] = (),
    *,
    advice: str | None = None,
    choices: set[str] | None = None,
) -> str:
    """Return which of the ``names`` is ``name``, or else the first of the ``usual`` names.

    If several have a usual name, add a sentence about it to ``choices``, or without these log it. Raises UsageError if
    the table ``url`` lacks the column, or has it twice. It tells the user to name it with ``option``, or ``advice``.
    """
    advice = advice or f"name the right one with {option}"
    column = find_column(names, name, usual)
    if column is None:
        lacking = f"no column {name!r}{did_you_mean(name, names)}" if name else f"none of {', '.join(usual)}"
        # If it is the name of a record, first show what is in that.
        shown = sorted(names, key=lambda column: not column.startswith(f"{name}."))[:10]
        raise UsageError(f"{url} has {lacking} among its columns {', '.join(shown)}; {advice}.")
    if names.count(column) > 1:
        raise UsageError(f"{url} has {names.count(column)} columns {column!r}; rename one.")
    if name is None and len(candidates := [candidate for candidate in names if candidate.lower() in usual]) > 1:
        choice = f"{column!r} is read of the columns {', '.join(map(repr, candidates))}; if that is wrong, {advice}"
        if choices is None:
            _log.warning("In %s, %s.", url, choice)
        else:
            choices.add(choice)
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


def split_column(table: pa.Table, url: str, columns: LabelColumns) -> str | None:
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
        if name != columns.group and (is_part(name) or name.lower() in _NAMES_OF_SPLITS or name in doubtful):
            _log.warning(
                "The column %r of %s is not read; a column split with train, validation and test would be.", name, url
            )
    return None


def with_parts_of_tags(table: pa.Table, url: str, columns: LabelColumns) -> pa.Table:
    """Return a table whose columns of lists that say the part of each row, as FiftyOne's tags do, are texts instead.

    A text is the part's name, or empty for a row without one. If a row has several, log that the column is not read.
    """
    label = find_column(table.column_names, next(iter(columns.label), None), LABEL_COLUMNS)
    for index, name in enumerate(table.column_names):
        column = table.column(index)  # by its place, as several columns may have one name
        if name == label or not pa.types.is_list(column.type) or column.type.value_type not in TEXT_TYPES:
            continue
        parts_of_rows = [list(filter(is_part, filter(None, tags or ()))) for tags in column.to_pylist()]
        if not parts_among(part for parts in parts_of_rows for part in parts):
            continue
        if num_several := sum(len(parts) > 1 for parts in parts_of_rows):
            sentence = "The column %r of %s is not read as the split: %s of its lists name several parts."
            _log.warning(sentence, name, url, f"{num_several:,}")
            continue
        table = table.set_column(index, name, pa.array(["".join(parts) for parts in parts_of_rows]))
    return table


def texts_of(table: pa.Table, url: str, name: str, *, may_be_lists: bool = False) -> pa.ChunkedArray:
    """Return a column as composed texts without surrounding blanks; a missing value is empty.

    If it ``may_be_lists``, a list becomes one text, in which each item ends in JOINED. Raises UsageError if the values
    cannot be text.
    """
    if table.column_names.count(name) > 1:
        raise UsageError(f"The label file {url} has {table.column_names.count(name)} columns {name!r}; rename one.")
    # Arrow makes texts of numbers and booleans. Lists need words of our own.
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
        raise UsageError(
            f"The column {name!r} of {url} holds {'lists' if are_lists else f'values of type {column.type}'}, and one "
            "text or number per row is expected; an image with several classes has a column of 0 and 1 for each "
            "(--label-column), or one text such as cat|dog (--label-separator)."
        ) from None
    except pa.ArrowInvalid:
        raise UsageError(f"The column {name!r} of {url} holds bytes that are not text in UTF-8; correct it.") from None

    # Make one text of what programs write in several ways: é as one character or two, and True, TRUE or true.
    # Not by Arrow's utf8_normalize, which takes NFC for NFD before version 26.
    text = pc.utf8_trim_whitespace(text.fill_null(""))
    if not pc.all(pc.string_is_ascii(text)).as_py():
        text = pa.chunked_array([[composed(value) for value in text.to_pylist()]])
    is_flag = pc.is_in(text, pa.array(BOOLEANS))
    if pc.any(is_flag).as_py() and pc.all(pc.or_(is_flag, pc.is_in(text, pa.array(sorted(NO_LABELS))))).as_py():
        text = pc.if_else(is_flag, pc.utf8_lower(text), text)
    return text


def as_text(column: Any) -> Any:
    """Return an Arrow array as texts; raise pa.ArrowNotImplementedError or pa.ArrowInvalid if that is impossible."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string())


def labels_of(table: pa.Table, url: str, columns: LabelColumns) -> list[str]:
    """Return the label of each row: a class, or sorted classes joined by JOINED; empty if it has none.

    Raises UsageError if a column of labels is missing, or its values are not of the kind that ``columns`` asks for.
    """
    if len(columns.label) > 1:
        return _labels_of_flags(table, url, columns.label)

    # One column, whose values may be lists.
    wanted = next(iter(columns.label), None)
    is_missing = wanted is None and find_column(table.column_names, None, LABEL_COLUMNS) is None
    advice = _advice_on_flags(table, url) if is_missing else None
    option = "--label-column (or several, of 0 and 1)"
    name = column_called(table.column_names, url, option, wanted, LABEL_COLUMNS, advice=advice)
    labels: list[str] = texts_of(table, url, name, may_be_lists=True).to_pylist()
    items_of = {label: _items(label, columns.separator) for label in set(labels)}

    # With one class for each image, a list of one item, or of the same one again, as of several people who agree, is as
    # good as a text.
    if columns.separator is None:
        if num_several := sum(len(set(items_of[label])) > 1 for label in labels):
            raise UsageError(
                f"{num_several:,} of {len(labels):,} rows of {url} have a list of several labels; give "
                "--label-separator , if images may have several classes, or leave one label for each."
            )
        return single_classes(["".join(items_of[label][:1]) for label in labels], url)

    # With several classes, a list may not hold the numbers 0 and 1 in place of names.
    several = [[] if label in NO_LABELS else items_of[label] for label in labels]
    if len(several[0]) > 1 and all(len(names) == len(several[0]) and {*names} <= _FLAGS.keys() for names in several):
        raise UsageError(
            f"Each label in the column {name!r} of {url} has {len(several[0]):,} numbers 0 or 1, which do not say the "
            "classes that they stand for; write a column for each class, and name these with --label-column."
        )
    return [JOINED.join(sorted(set(names))) for names in several]


def _labels_of_flags(table: pa.Table, url: str, names: Sequence[str]) -> list[str]:
    """Return the classes of each row, sorted and joined by JOINED, from a column of 0 and 1 for each class.

    Raises UsageError if a class is named twice, or a column has other values.
    """
    classes = list(map(composed, names))
    name, count = Counter(classes).most_common(1)[0]
    if count > 1:
        raise UsageError(f"--label-column names {name!r} {count} times; name each class once.")
    flags_of_classes: list[Texts] = []
    for name in names:
        texts = texts_of(table, url, column_called(table.column_names, url, "--label-column", name)).to_pylist()
        flags = _flags(texts)
        if wrong := int((flags == "").sum()):
            value = texts[int((flags == "").argmax())]
            raise UsageError(
                f"{wrong:,} of {len(flags):,} rows of {url} have neither 0 nor 1 in the column {name!r}, but "
                f"{repr(value) if value else 'nothing'} for instance; correct them, or name one --label-column."
            )
        flags_of_classes.append(flags)
    rows = zip(*flags_of_classes, strict=True)
    return [JOINED.join(sorted(compress(classes, (flag == "1" for flag in row)))) for row in rows]


def _advice_on_flags(table: pa.Table, url: str) -> str | None:
    """Return what to do with a table that has no column of labels, but several of 0 and 1; None without these."""
    flags = [name for name in table.column_names if _has_flags(table, url, name)]
    if len(flags) < 2:
        return None
    shown = " ".join(map(shlex.quote, flags[:_MOST_SHOWN])) + (" …" if len(flags) > _MOST_SHOWN else "")
    advice = f"name the right one with --label-column, or the classes among those of 0 and 1: {shown}"
    values = np.stack([_flags(texts_of(table, url, name).to_pylist()) for name in flags])  # (C, N)
    if ((values == "1").sum(axis=0) == 1).all():
        advice += f"; each row has exactly one 1 in these: if an image has one class, {ONE_CLASS_EACH}"
    return advice


def _has_flags(table: pa.Table, url: str, name: str) -> bool:
    """Return True if a column that occurs once holds nothing but 0 and 1, as one for a class does."""
    if table.column_names.count(name) > 1 or pa.types.is_nested(table[name].type):
        return False
    return "" not in _flags(texts_of(table, url, name).unique().to_pylist())


def _flags(texts: Sequence[str]) -> Texts:
    """Return "0" or "1" for each text in a column that is for one class, (N,); empty for any other text.

    In a column of -1 and 1 alone, as CelebA has them, -1 is 0.
    """
    flag_of = _SIGNS if _SIGNS.keys() >= set(texts) else _FLAGS
    return np.array([flag_of.get(text.lower(), "") for text in texts], object)


def _items(label: str, separator: str | None) -> list[str]:
    """Return the texts of which a label consists: the items of a list, or what is between separators, or the label.

    A list is one of Arrow's (see :func:`texts_of`), or a text in which JSON or Python writes a list, or an object, as
    many programs do that export CSV.

    >>> _items("['cat', 'dog']", None), _items('[{"name": "cat"}]', None), _items("cat|dog", "|")
    (['cat', 'dog'], ['cat'], ['cat', 'dog'])
    """
    if JOINED in label:
        return label.removesuffix(JOINED).split(JOINED)
    value = parsed_text(label)
    if isinstance(value, (dict, list)):
        items: list[Any] = [value]
        while any(isinstance(item, (dict, list)) for item in items):
            lists = [list(item.values()) if isinstance(item, dict) else item for item in items]
            items = [inner for item in lists for inner in (item if isinstance(item, list) else [item])]
        if all(isinstance(item, (str, int)) for item in items):
            return [text for item in items if (text := composed(str(item).strip()))]
    if separator is None:
        return [label]
    return [name for part in label.strip("[]").split(separator) if (name := part.strip(" '\""))]


def is_whole_number(label: str) -> bool:
    """Return True if a label is a whole number, perhaps with ``.0`` behind it."""
    return _NUMBER.fullmatch(label) is not None


def single_classes(labels: Sequence[str], url: str) -> list[str]:
    """Return the class in each label of ``url``, empty for a text that means "no label".

    Log how many of these there are. Whole numbers lose ``.0``, which programs write if some are missing.

    >>> single_classes(["1.0", "2", "-1"], "labels.csv")
    ['1', '2', '']
    """
    # Among numbers, -1 and R's NA mean "no label", too. Beside names, they are classes, and so is -1 beside 1 alone.
    no_labels = NO_LABELS
    present = set(labels) - NO_LABELS - {"NA"}
    if present and all(map(is_whole_number, present)):
        labels = [_ZEROS.sub("", label) for label in labels]
        no_labels |= {"NA"} if present <= {"-1", "1", "-1.0", "1.0"} else {"NA", "-1"}
    if counts := Counter(label or "empty" for label in labels if label in no_labels):
        counted_texts = ", ".join(f"{count:,} {text}" for text, count in counts.items())
        _log.warning("Not used of %s: %s without a label (%s).", url, f"{counts.total():,}", counted_texts)
    return ["" if label in no_labels else label for label in labels]
