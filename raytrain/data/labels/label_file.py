"""Label files, whose rows say key and class of each image, perhaps split and group.

A label file goes this way: :func:`_open_table` reads it as a table of texts; :func:`label_table` takes keys, labels,
splits and groups out of its columns, which :mod:`~raytrain.data.labels.label_columns` finds; and
:meth:`LabelTable.rows_of` finds the row of each image, whose key may lack folders or suffix.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute

from raytrain.data.labels.class_names import composed
from raytrain.data.labels.folders import read_folders, top_folders
from raytrain.data.labels.label_columns import (
    JOINED,
    NO_LABELS,
    LabelColumns,
    Texts,
    column_called,
    find_column,
    is_whole_number,
    labels_of,
    split_column,
    texts_of,
    with_parts_of_tags,
)
from raytrain.data.labels.label_csv import is_invented_name
from raytrain.data.labels.label_formats import KEY_COLUMNS, LABEL_COLUMNS, METADATA, read_table
from raytrain.data.labels.listing import check_folder, ends_like_image, first_names
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import Part, is_held_out, is_part, is_training, parts_among
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError, format_count
from raytrain.storage.store import Store

pc: Any = pyarrow.compute  # whose functions are made at import

_log = logging.getLogger("raytrain")
# Columns in which people confirm labels or deny them: the values that confirm, and those that deny.
_DENIALS = {"confidence": (("1", "1.0"), ("0", "0.0")), "answer": (("accept",), ("reject", "ignore"))}


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
    def has_one_class_each(self) -> bool:
        """True if each row has exactly one class, as tables of single classes do that have a column for each."""
        return all(label and JOINED not in label for label in self.labels)

    @property
    def digest(self) -> str:
        """SHA-256 of all rows, as hexadecimal digits: the same for the same rows in any order and format."""
        if self.pattern_digest is not None:
            return self.pattern_digest
        columns = (self.keys, self.labels, self.splits, self.groups)
        return hashlib.sha256("\1".join("\0".join(column) for column in columns).encode()).hexdigest()

    def rows_of(self, images: Manifest) -> Int64s:
        """Return the row of each image, (len(images),); -1 if it has none.

        All keys are compared in the same form: the first of :func:`_forms_of_keys` in which an image has a row.
        """
        keys = [comparable_key(str(key)) for key in images.keys.to_pylist()]
        for paths, forms in _forms_of_keys(self.keys, images.url):
            row_of = {path: row for row, path in enumerate(paths) if path}
            if len(row_of) < len({key for key, path in zip(self.keys, paths, strict=True) if path}):
                continue  # keys that differ would be the same
            for form in forms:
                rows = np.array([row_of.get(form(key), -1) for key in keys], np.int64)
                if (rows >= 0).any():
                    return rows
        return np.full(len(keys), -1)


_Forms = tuple[Callable[[str], str], ...]
"""Functions that turn the key of an image into one that a table may have."""


def _forms_of_keys(keys: Texts, images_url: str) -> Iterator[tuple[Sequence[str], _Forms]]:
    """Yield forms of a table's keys, the likeliest first, each with those of the images' keys to compare with them.

    A form of a key is empty if it does not fit that key. ``images_url`` is the folder of the images.
    """
    # Many tables have keys without suffixes, or without folders.
    yield keys.tolist(), (str, _stem, posixpath.basename, _stem_of_name)

    # Or keys are paths on another machine, such as C:/photos/cat/1.jpg, where the folder of the images has the same
    # name: then compare what comes after that name. Prefer keys with the folder above it, too, since train/images and
    # val/images are not the same folder.
    *_, parent, folder = f"/{images_url.rstrip('/')}".split("/")
    for anchor in (f"/{parent}/{folder}/", f"/{folder}/"):
        places = [f"/{key}".partition(anchor) for key in keys]
        is_other_part = [is_part(parent) and is_part(posixpath.basename(before)) for before, _, _ in places]
        yield ["" if other else path for (_, _, path), other in zip(places, is_other_part, strict=True)], (str, _stem)

    # Or keys begin with folders that the images are not in, such as the bucket that these were downloaded from.
    for paths in _without_shared_folders(keys):
        yield paths, (str, _stem)

    # Or keys are URLs, whose folders say where the images were, and the images lie in one folder now.
    if names := _names_of_urls(keys.tolist()):
        yield names, (str, _stem)

    # Or the images have other suffixes, such as .JPG or, after a conversion, .png.
    if all(map(ends_like_image, keys)):
        yield list(map(_stem, keys)), (_stem, _stem_of_name)


def _without_shared_folders(keys: Iterable[str]) -> Iterator[list[str]]:
    """Yield the keys without the first folder if all share it, then without the first two, and so on.

    The bucket of a URL counts as a folder. A key keeps at least one folder, since 1.jpg alone may be another image, and
    a folder of a part stays, since train/cat/1.jpg is not cat/1.jpg below val/.

    >>> list(_without_shared_folders(["b/x/1.jpg", "b/y/1.jpg"]))
    [['x/1.jpg', 'y/1.jpg']]
    """
    paths = [key.rpartition("://")[2].split("/") for key in keys]
    while paths:
        first = paths[0][0]
        if is_part(first) or any(path[0] != first or len(path) <= 2 for path in paths):
            return
        paths = [path[1:] for path in paths]
        yield ["/".join(path) for path in paths]


def _names_of_urls(keys: Sequence[str]) -> list[str]:
    """Return the names of the files of URLs; none if a key is no URL, or leads through a folder of a part.

    >>> _names_of_urls(["s3://b/x/1.jpg", "https://test.org/y/2.jpg"]), _names_of_urls(["s3://b/train/1.jpg"])
    (['1.jpg', '2.jpg'], [])
    """
    folders = {
        folder
        for key in keys
        for folder in key.split("/")[3 if key.startswith("http") else 2 : -1]  # the name of a host says no part
    }
    are_places = all("://" in key for key in keys) and not any(map(is_part, folders))
    return list(map(posixpath.basename, keys)) if are_places else []


def _stem(key: str) -> str:
    """Return a key without the suffix of its file."""
    return posixpath.splitext(key)[0]


def _stem_of_name(key: str) -> str:
    """Return the name of a key's file without folders and suffix."""
    return _stem(posixpath.basename(key))


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


def _has_images(table: pa.Table, name: str) -> bool:
    """Return True if ``table`` has a column of this name, in any case, whose values all end like an image."""
    column = find_column(table.column_names, None, (name,))
    if column is None or table.column_names.count(column) > 1:
        return False
    return all(isinstance(value, str) and ends_like_image(value) for value in table[column].to_pylist())


def label_table(table: pa.Table, url: str, columns: LabelColumns, images_urls: Sequence[str]) -> LabelTable:
    """Return the rows of a table of the label file ``url``, and log what is not used of it.

    Raises UsageError as :func:`read_label_file` does.
    """
    if not len(table):
        raise UsageError(f"The label file {url} has no row; it must have one for each image.")
    table = _without_absent_classes(table, url, columns)
    key = _key_column(table, url, columns)
    keys = [normalized_key(text, images_urls) for text in texts_of(table, url, key).to_pylist()]
    table = with_parts_of_tags(table, url, columns)
    split = split_column(table, url, columns)
    group = columns.group and column_called(table.column_names, url, "--group-by", columns.group)

    # Of three columns without a header, as AutoML writes them, the one beside image and split has the labels. A list of
    # images has no column of labels: the folders in it are the labels.
    others = [name for name in table.column_names if name not in (key, split)]
    if not columns.label and len(others) == 1 and is_invented_name(others[0]):
        columns = replace(columns, label=(others[0],))
    if len(table.column_names) > 1 or columns.label:
        labels = labels_of(table, url, columns)
    elif any(labels := list(read_folders(keys, url).classes)):
        _log.warning("%s has no labels: the folders in it are the classes.", url)
    else:
        raise UsageError(
            f"The label file {url} has one column, such as {keys[0]!r}, with neither labels nor folders; give one with "
            "the path and the label of each image."
        )

    # Drop rows without a key, and repeated rows.
    empty = [""] * len(table)
    splits = pc.utf8_lower(texts_of(table, url, split)) if split else empty
    groups = texts_of(table, url, group) if group else empty
    rows = pa.table({"key": keys, "label": labels, "split": splits, "group": groups})
    rows = rows.filter(pc.not_equal(rows["key"], ""))
    if num_without_key := len(table) - len(rows):
        _log.warning("Rows of %s that name no image are not used: %s.", url, f"{num_without_key:,}")
    if not len(rows):
        raise UsageError(f"No row of the label file {url} names an image; its keys are empty.")
    if columns.separator is not None:
        rows = _joined_rows(rows)
    rows = rows.group_by(rows.column_names).aggregate([]).sort_by("key")
    keys, labels, splits, groups = (np.array(rows[name].to_pylist(), object) for name in rows.column_names)

    # Without a column of splits, the folders may say the split, if they are called train, test and so on for all keys.
    if not any(splits):
        tops = top_folders(keys)
        parts = parts_among(tops)
        are_splits = bool(parts) and {*tops} <= {*parts}
        splits = np.array([top.lower() if are_splits else "" for top in tops], object)
        if are_splits:
            sentence = "The folders %s in %s say the split into training and held-out images."
            _log.warning(sentence, first_names(parts), url)

    # Classes are listed only where an image may have several of them, or none.
    classes: tuple[str, ...] | None = None
    if len(columns.label) > 1:
        classes = tuple(map(composed, columns.label))
    elif columns.separator is not None:
        classes = tuple(sorted({name for label in set(labels) for name in label.split(JOINED)} - {""}))
    label_rows = LabelTable(url, keys, labels, splits, groups, classes)
    _check_rows(label_rows, columns)
    return label_rows


def _key_column(table: pa.Table, url: str, columns: LabelColumns) -> str:
    """Return the column of keys: the one that ``columns`` names, or one of those with a usual name.

    Raises UsageError if there is none, or it has numbers and another one names of images.
    """
    # Of several with usual names, one whose values end like images has the keys: `key` may number the rows.
    usual = sorted(KEY_COLUMNS, key=lambda name: not _has_images(table, name))
    key = column_called(table.column_names, url, "--key-column", columns.key, usual)

    # Numbers beside names of images may be those of the rows, and still be the names of other images without suffix.
    # URLs are where the images come from, as in the columns image, label and url.
    may_be_rows = not columns.key and all(map(is_whole_number, texts_of(table, url, key).to_pylist()))
    other_names = [name for name in table.column_names if _has_images(table, name)] if may_be_rows else []
    if names := [name for name in other_names if "://" not in str(table[name][0])]:
        raise UsageError(
            f"{url} has numbers in the column {key!r}, and names of images in {names[0]!r}; name the right one with "
            "--key-column."
        )
    return key


def _joined_rows(rows: pa.Table) -> pa.Table:
    """Return one row for all that are alike but for their labels, with all of their classes.

    Open Images and detections have a row for each class of an image.
    """
    classes_of: dict[tuple[str, str, str], set[str]] = {}
    names = ("key", "split", "group")
    for label, *others in zip(*(rows[name].to_pylist() for name in ("label", *names)), strict=True):
        classes_of.setdefault(tuple(others), set()).update(label.split(JOINED))
    labels = [JOINED.join(sorted(classes - {""})) for classes in classes_of.values()]
    columns = zip(*classes_of, strict=True)
    return pa.table({"label": labels, **dict(zip(names, map(list, columns), strict=True))}).select(rows.column_names)


def _without_absent_classes(table: pa.Table, url: str, columns: LabelColumns) -> pa.Table:
    """Return a table without the rows in which a person has denied the label of an image, and log their number.

    Open Images writes a confidence of 0 then, beside 1 for all others, and Prodigy the answer reject, or ignore, beside
    accept. A column with other values, such as the fractions of a model, says nothing of the kind.
    """
    for usual, (kept, denied) in _DENIALS.items():
        name = find_column(table.column_names, None, (usual,))
        if name is None or name in columns.label or len(columns.label) > 1:
            continue
        texts = texts_of(table, url, name)
        is_kept, is_denied = pc.is_in(texts, pa.array(kept)), pc.is_in(texts, pa.array(denied))
        if not pc.all(pc.or_(is_kept, is_denied)).as_py() or not pc.any(is_kept).as_py():
            continue
        if num_denied := pc.sum(is_denied).as_py():
            values = " or ".join(text for text in denied if text in texts.to_pylist())
            sentence = "Rows of %s whose %s is %s, so that the label does not hold, are not used: %s."
            _log.warning(sentence, url, name, values, f"{num_denied:,}")
            table = table.filter(is_kept)
    return table


def comparable_key(key: str) -> str:
    """Return a key in the form in which keys are compared: composed, and with slashes where Windows writes others.

    >>> comparable_key("data/train\\\\cat\\\\1.jpg")
    'data/train/cat/1.jpg'
    """
    return composed(key).replace("\\", "/")


def _decoded(key: str) -> str:
    """Return the URL of a web server without signs such as %20 and without its query, which may hold a signature.

    Label Studio has the path of a file of its own machine in the query. Keys of buckets stay, where both are names.

    >>> _decoded("https://host/a%20b.jpg?Signature=x"), _decoded("/data/local-files/?d=img%2F1.jpg")
    ('https://host/a b.jpg', 'img/1.jpg')
    """
    address, _, query = key.partition("?")
    if address.endswith("/local-files/") and query.startswith("d="):
        return unquote(query.removeprefix("d="))
    return unquote(address) if key.startswith(("https://", "http://")) else key


def normalized_key(key: str, images_urls: Sequence[str]) -> str:
    """Return a key as a path below one of ``images_urls``: ``./a//b.png`` and the whole URL become ``a/b.png``.

    The key of an image elsewhere stays a whole URL, or becomes a path without the slash at its start.
    """
    key = comparable_key(_decoded(key.strip())).removeprefix("file://")
    scheme, separator, path = key.rpartition("://")
    path = posixpath.normpath(path).removeprefix("./") if path else ""
    key = f"{scheme}{separator}{path}"
    for prefix in (form for url in images_urls for form in (url, os.path.realpath(url))):
        key = key.removeprefix(composed(prefix.rstrip("/")) + "/")
    return key.lstrip("/")


def _check_rows(table: LabelTable, columns: LabelColumns) -> None:
    """Raise UsageError if a key has several labels, or an image has no group although there are groups."""
    # Rows are sorted by key, and equal rows have been merged: a key that comes again has another label.
    repeated = np.flatnonzero(table.keys[1:] == table.keys[:-1])
    if len(repeated):
        first = int(repeated[0])
        rows = zip(table.labels, table.splits, table.groups, strict=True)
        first_row, second_row = (
            " ".join(filter(None, row)).replace(JOINED, " ") for row in islice(rows, first, first + 2)
        )
        have_one_class = len(columns.label) < 2 and columns.separator is None
        may_be_several = have_one_class and table.labels[first] != table.labels[first + 1]
        advice = ", or give --label-separator if an image may have several classes" if may_be_several else ""
        raise UsageError(
            f"The label file {table.url} contradicts itself for {format_count(len(set(table.keys[repeated])), 'key')}, "
            f"such as {table.keys[first]!r}, which is {first_row!r} and {second_row!r}; leave one row for each "
            f"key{advice}."
        )

    # Images without a group could be on both sides of a split.
    num_missing = int(np.isin(table.groups.astype(str), list(NO_LABELS)).sum())
    if columns.group is not None and num_missing:
        raise UsageError(
            f"{num_missing:,} of {len(table.keys):,} rows of {table.url} have no {columns.group!r}, which --group-by "
            "needs; fill them in."
        )
