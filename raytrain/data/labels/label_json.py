"""Tables in JSON: label files of records, of columns, of objects by image or by class, of COCO or of Datumaro.

A file has one document, or one a line. It may have an object for each part (train, test). Names of classes beside the
table replace their numbers in it. What is inside of a record is a column of its own, called by its path, such as
ground_truth.label.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from typing import Any

import pyarrow as pa

from raytrain.data.labels.label_csv import invented_names, is_header, is_image
from raytrain.data.labels.part_names import is_part
from raytrain.errors import format_count

_NO_BLANK = re.compile(r"\S")
_CLASS_NAMES = "classes", "class_names", "categories", "names"  # of a list of classes beside a table
_MOST_CELLS, _MOST_CELLS_PER_VALUE = 100_000_000, 100  # of a table of records, which may have names of their own
_Record = dict[str, Any]


def read_json(text: str, suffix: str, key_names: Set[str], label_names: Set[str]) -> pa.Table:
    """Read one document, or several one after the other, with numbers as texts, as they are written.

    Raises ValueError if it is no JSON, or has no table in a form that is known.
    """
    decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=_refuse_repetition)
    documents, end = list[Any](), 0
    while start := _NO_BLANK.search(text, end):
        document, end = decoder.raw_decode(text, start.start())
        documents.append(document)

    # A single document is the table, unless it is the only record of a .jsonl. Several documents are its records.
    is_table = len(documents) == 1 and (suffix == ".json" or isinstance(documents[0], list))
    document, class_names = _split_class_names(documents[0] if is_table else documents)
    records = _records(document, key_names)
    if class_names:
        _name_classes(records, class_names, label_names)

    # A record may lack what others have: its value is null then.
    if not _is_list_of(records, dict):
        raise ValueError("it has no records")
    records = [_flat(record) for record in _without_mixed_values(records)]
    columns = dict.fromkeys(name for record in records for name in record)
    num_cells, num_values = len(columns) * len(records), sum(map(len, records))
    if num_cells > max(_MOST_CELLS, _MOST_CELLS_PER_VALUE * num_values):
        raise ValueError(
            f"its {len(records):,} records have {len(columns):,} different names in them, such as "
            f"{[*columns][-1][:80]!r}, and a table would have a column for each; write such names as values"
        )
    return pa.table({name: _column([record.get(name) for record in records]) for name in columns})


def _refuse_repetition(pairs: Sequence[tuple[str, Any]]) -> _Record:
    """Return a JSON object as a dictionary; raise ValueError if a name is in it twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {max(names, key=names.count)!r} is there twice in one object")
    return record


def _split_class_names(document: Any) -> tuple[Any, dict[str, str]]:
    """Split a document into its table and the names of its classes, by number as text; none if it does not name them.

    Without a table beside them, what looks like names of classes is the table itself. Raises ValueError if several
    classes have the same name, or a class has no number.
    """
    if not isinstance(document, dict) or "annotations" in document or _is_datumaro(document):  # read with the images
        return document, {}
    name = next((name for name in _CLASS_NAMES if isinstance(document.get(name), (dict, list))), None)
    table = _table_beside_names(document)
    if name is None or table is None:
        return document, {}

    # The names are a list, a list of COCO's categories, or an object from numbers to names or from names to numbers.
    classes = document[name]
    if isinstance(classes, list):
        are_categories = _is_list_of(classes, dict)
        pairs = [(category["id"], category["name"]) for category in classes] if are_categories else enumerate(classes)
    elif all(map(str.isdecimal, classes)):
        pairs = classes.items()
    else:
        pairs = [(number, class_name) for class_name, number in classes.items()]
    names = {str(number): str(class_name) for number, class_name in pairs}
    if len(set(names.values())) < len(classes) or not all(map(str.isdecimal, names)):
        raise ValueError(f"{name} has to give each class a number and a name of its own")
    return table, names


def _table_beside_names(document: _Record) -> _Record | None:
    """Return a document without its names of classes if that is a table, or has one for each part; None otherwise."""
    beside_names = {name: value for name, value in document.items() if name not in _CLASS_NAMES}
    if any(_is_list_of(value, (dict, list)) or _is_by_image(value) for value in beside_names.values()):
        return beside_names
    if beside_names and all(map(is_part, beside_names)):
        return beside_names
    # FiftyOne writes {"classes": […], "labels": {"0001": 1}}, with names of images without their suffixes.
    objects = [value for value in beside_names.values() if isinstance(value, dict)]
    return objects[0] if len(objects) == 1 and all(isinstance(label, str) for label in objects[0].values()) else None


def _records(document: Any, key_names: Set[str]) -> list[_Record]:
    """Return the rows of a document in any form in which programs write tables; raise ValueError for other forms."""
    if isinstance(document, list):
        return _records_of_list(document)
    if not isinstance(document, dict) or not document:
        raise ValueError("it has no records")
    if {"images", "annotations"} <= document.keys():
        return _coco_records(**document)
    if _is_datumaro(document):
        return _datumaro_records(document["categories"]["label"]["labels"], document["items"])
    if {"columns", "data"} <= document.keys():  # as pandas writes a table with orient="split"
        return _records_of_lists(document["columns"], document["data"])
    if all(map(is_part, document)):
        return [{**record, "split": name} for name, part in document.items() for record in _records(part, key_names)]

    # If the document holds one list, that is the table, whatever stands beside it.
    lists = {name: value for name, value in document.items() if _is_list_of(value, (dict, list))}
    if len(lists) > 1:
        raise ValueError(f"it holds several tables, {', '.join(list(lists)[:5])}")
    if lists:
        (rows,) = lists.values()
        return _records_of_list(rows)

    # Otherwise it is an object by image or by class, or holds a single one by image, or of records that name images.
    def names_images(value: Any) -> bool:
        records = list(value.values()) if isinstance(value, dict) else []
        return _is_list_of(records, dict) and all(is_header(list(record), key_names) for record in records)

    by_image = [value for value in document.values() if _is_by_image(value) or names_images(value)]
    return _keyed_records(by_image[0] if len(by_image) == 1 else document, key_names)


def _keyed_records(document: _Record, key_names: Set[str]) -> list[_Record]:
    """Return the rows of an object that has columns by name, records or labels by image, or images by class."""
    names, values = list(document), list(document.values())

    # Columns by name: lists or, as pandas writes them, objects with the row's number as name.
    if is_header(names, key_names) and all(isinstance(value, (dict, list)) for value in values):
        columns = [value if isinstance(value, dict) else dict(enumerate(value)) for value in values]
        if any(column.keys() != columns[0].keys() for column in columns):
            raise ValueError(f"its columns have {min(map(len, columns)):,} to {max(map(len, columns)):,} values")
        return [{name: column[row] for name, column in zip(names, columns, strict=True)} for row in columns[0]]

    # Records by image, or by anything else if each record names its image.
    if all(isinstance(value, dict) for value in values):
        has_keys = all(is_header(list(record), key_names) for record in values)
        return values if has_keys else [{"key": name, **record} for name, record in document.items()]

    # Lists of images by class, of which some may be empty. Paths may lack their suffixes, unless the names have these.
    if any(values) and all(isinstance(value, list) for value in values):
        keys = [key for value in values for key in value]
        may_lack_suffix = not any(map(is_image, names))
        if all(is_image(key) or (may_lack_suffix and isinstance(key, str) and "/" in key) for key in keys):
            return [{"key": key, "label": name} for name, keys in document.items() for key in keys]

    # Labels by image.
    return [{"key": name, "label": label} for name, label in document.items()]


def _coco_records(
    images: list[_Record], annotations: list[_Record], categories: Sequence[_Record] = (), **_: Any
) -> list[_Record]:
    """Return the images of a COCO document as rows, each with the list of its categories as label.

    If no category has a name, their ids are the labels. Raises ValueError if only some have one, ids or names are not
    unique, or an annotation has an id of no image or category.
    """
    names = {category["id"]: category["name"] for category in categories if category.get("name")}
    if names and (unnamed := [category["id"] for category in categories if not category.get("name")]):
        counted = f"{len(unnamed):,} of its {len(categories):,} categories"
        raise ValueError(f"{counted} have no name, such as the one with the id {unnamed[0]}")
    labels = {image["id"]: list[str]() for image in images}
    if len(labels) < len(images) or (names and len(set(names.values())) < len(categories)):
        raise ValueError("several of its images have one id, or several of its categories one id or name")
    for annotation in annotations:
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in labels or (names and category not in names):
            raise ValueError(f"an annotation of the image {image} and the category {category} has an id not in a list")
        labels[image].append(names[category] if names else category)
    return [{**image, "label": labels[image["id"]]} for image in images]


def _is_datumaro(document: _Record) -> bool:
    """Return True if a document has items, and categories by kind, among them labels, as Datumaro writes."""
    categories = document.get("categories")
    labels = categories.get("label") if isinstance(categories, dict) else None
    return isinstance(labels, dict) and "labels" in labels and "items" in document


def _datumaro_records(categories: list[_Record], items: list[_Record]) -> list[_Record]:
    """Return the items of Datumaro, whose ids are paths without suffixes, each with the list of its labels' names.

    Raises ValueError if a label has no category.
    """
    names = {str(number): category["name"] for number, category in enumerate(categories)}
    records = list[_Record]()
    for item in items:
        numbers = [annotation["label_id"] for annotation in item["annotations"] if "label_id" in annotation]
        if unknown := [number for number in numbers if number not in names]:
            raise ValueError(
                f"the item {item['id']} has the label {unknown[0]}, of {format_count(len(names), 'label')}"
            )
        records.append({"key": item["id"], "label": [names[number] for number in numbers]})
    return records


def _records_of_list(rows: list[Any]) -> list[_Record]:
    """Return the records of a list. Its items are records already, or lists with a value for each column.

    Raises ValueError if they are anything else.
    """
    if _is_list_of(rows, list):
        return _records_of_lists(invented_names(rows[0]), rows)
    if not _is_list_of(rows, dict):
        raise ValueError("it is no list of records")
    return rows


def _records_of_lists(columns: list[str], rows: list[list[Any]]) -> list[_Record]:
    """Return a record for each of ``rows``; raise ValueError if one does not have a value for each of ``columns``."""
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            values, names = format_count(len(row), "value"), format_count(len(columns), "column")
            raise ValueError(f"row {number:,} has {values}, and there are {names}")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _is_list_of(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Return True if a value is a list of at least one item, all of these types."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, kinds) for item in value)


def _is_by_image(value: object) -> bool:
    """Return True if a value is an object whose names are all those of images."""
    return isinstance(value, dict) and bool(value) and all(map(is_image, value))


def _name_classes(records: list[_Record], names: dict[str, str], label_names: Set[str]) -> None:
    """Replace numbers of classes by their ``names`` in the columns of labels, unless the labels are names already.

    ``records`` are changed. Raises ValueError if the labels may be either, or a number has no name.
    """
    for column in {name for record in records for name in record if name.lower() in label_names}:
        labels_of_rows = [_texts_in(record.get(column)) for record in records]
        labels = {label for texts in labels_of_rows for label in texts}

        # Lists with a 0 or 1 for each class hold no numbers of classes. They are refused where labels are read.
        are_flags = labels <= {"0", "1"} and all(len(texts) == len(names) for texts in labels_of_rows)
        if are_flags and len(names) > 1:
            continue
        if labels <= set(names.values()):
            if labels <= names.keys() and any(names[label] != label for label in labels):
                raise ValueError(f"the labels, such as {min(labels)!r}, are numbers of its classes as well as names")
            continue
        if unknown := sorted(labels - names.keys()):
            raise ValueError(f"the label {unknown[0]!r} is none of its {format_count(len(names), 'class')}")
        for record in records:
            label = record.get(column)
            named = [names[number] for number in _texts_in(label)]
            record[column] = named if isinstance(label, list) else next(iter(named), label)


def _texts_in(label: Any) -> list[str]:
    """Return the texts of a label, which is one text or a list of several; empty texts are left out."""
    return [text for text in (label if isinstance(label, list) else [label]) if isinstance(text, str) and text]


def _flat(record: _Record, above: str = "") -> _Record:
    """Return a record without records in it: their values are called by their paths, below ``above``.

    A list of records becomes lists of their values, so that ``{"a": [{"b": 1}, {"b": 2}]}`` is ``{"a.b": [1, 2]}``.
    """
    flat = _Record()
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        elif _is_list_of(value, dict):
            for path, values in [pair for item in value for pair in _flat(item, f"{above}{name}.").items()]:
                flat.setdefault(path, []).extend(values if isinstance(values, list) else [values])
        else:
            flat[above + name] = value
    return flat


def parsed_text(text: str) -> Any:
    """Return the list or object that JSON or Python has written as ``text``, its numbers as texts; None without one.

    >>> parsed_text("['cat', 2]"), parsed_text('{"animal": "cat"}'), parsed_text("cat")
    (['cat', '2'], {'animal': 'cat'}, None)
    """
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return None
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        try:
            return json.loads(text, parse_int=str, parse_float=str)
        except ValueError:
            return json.loads(json.dumps(ast.literal_eval(text)), parse_int=str, parse_float=str)
    return None


def with_columns_of_objects(table: pa.Table, names: Set[str]) -> pa.Table:
    """Return a table of texts in which the values of objects are columns of their own, such as file_attributes.kind.

    A column is replaced if all its texts are objects, with several names in them, and it is among ``names``, in lower
    case, or a path among them begins with it. An object of one value is read as a label is, as that value.
    """
    for name, column in zip(table.column_names, table.columns, strict=True):
        texts = [(text or "").strip() for text in column.to_pylist()]
        is_read = any(f"{path}.".startswith(f"{name.lower()}.") for path in names)
        if not is_read or not all(text[:1] in ("", "{") for text in texts):
            continue
        objects = [parsed_text(text) if text else {} for text in texts]
        rows = [_flat(row, f"{name}.") for row in objects if isinstance(row, dict)]
        paths = dict.fromkeys(path for row in rows for path in row)
        if len(rows) == len(texts) and len(paths) > 1:
            table = table.drop_columns([name])
            for path in paths:
                table = table.append_column(path, _column([row.get(path) for row in rows]))
    return table


def _column(values: Sequence[Any]) -> pa.Array:
    """Return a column of texts, or of lists of texts if a value is a list.

    For lists of lists return nulls of a type that cannot be text, which is refused if the column is used.
    """
    if not any(isinstance(value, list) for value in values):
        return pa.array(list(map(_text, values)), pa.string())
    lists = [value if isinstance(value, list) else [value] for value in values]
    if any(isinstance(item, (list, dict)) for value in lists for item in value):
        return pa.nulls(len(values), pa.list_(pa.struct([])))
    return pa.array([list(map(_text, value)) for value in lists], pa.list_(pa.string()))


def _without_mixed_values(records: list[_Record]) -> Iterator[_Record]:
    """Yield the records with the value in an object in place of the object, if others have a text under its name.

    Label Studio writes ``"cat"`` for one choice and ``{"choices": ["cat", "dog"]}`` for several. An object of several
    values becomes its text.
    """
    are_texts = {name for record in records for name, value in record.items() if isinstance(value, str) and value}
    for record in records:
        mixed = {name: _flat(value) for name, value in record.items() if name in are_texts and isinstance(value, dict)}
        yield record | {
            name: next(iter(values.values())) if len(values) == 1 else json.dumps(record[name])
            for name, values in mixed.items()
        }


def _text(value: Any) -> str | None:
    """Return a value of JSON as the text of a label file, in which numbers are texts already; None for null."""
    return str(value).lower() if isinstance(value, bool) else value
