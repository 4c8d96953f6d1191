"""Tables in label files (CSV, lists in lines, JSON, Parquet), with each value as the text that stands in the file.

People write labels in many forms, and none of them says which one it is. :func:`read_table` takes the suffix for a
hint only. A text becomes a table like this:

- lines: columns between commas, semicolons, tabs or bars, or else between blanks; with a header or without one, in
  which case the column of images is called key.
- JSON: one document or one a line; records, columns, an object by image or by class, parts (train, test), or COCO.
  Names of classes beside the table replace their numbers in it. What is inside of a record is a column of its own,
  called by its path, such as ground_truth.label; so is it in Parquet.

Values stay texts throughout: 007 is not 7, and 3.0 is not 3.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
from collections.abc import Sequence, Set
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from raytrain.data.labels.listing import LFS_POINTER, SUFFIXES
from raytrain.data.labels.part_names import is_part
from raytrain.data.parquet_size import read_columns
from raytrain.errors import UsageError, format_count
from raytrain.storage.open import read_input

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # label files of Hugging Face's image folders
KEY_COLUMNS = ("key", "path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "category")

pc: Any = pyarrow.compute  # whose functions are made at import

_FORMATS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet")
_UTF_16_MARKS = b"\xff\xfe", b"\xfe\xff"
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"(\xb5/\xfd": "zstd",
    b"PK\3\4": "ZIP, as spreadsheets are",
}
_BLOCK_BYTES = 64 << 20  # the longest row that is read, such as one with a mask
_LINES = re.compile(r"[\r\n]+")
_DELIMITER_LINE = re.compile(r"sep=([,;\t|])[\r\n]+", re.IGNORECASE)
_QUOTED = re.compile(r'^\s*=?"([^"]*)"\s*$')
_NO_BLANK = re.compile(r"\S")
_IMAGE_AND_LABEL = re.compile(rf"(.*(?:{'|'.join(map(re.escape, SUFFIXES))}))\s+(\S.*)", re.IGNORECASE)
_REMARK = re.compile(r"#+\s*(?=\w)")
_BETWEEN_WORDS = re.compile(r"[\s,;|]+")
_CLASS_NAMES = "classes", "class_names", "categories", "names"  # of a list of classes beside a table
_Record = dict[str, Any]


def read_table(url: str, key_names: Set[str], label_names: Set[str], option: str | None = None) -> pa.Table:
    """Return the table in a file or a bucket's object, in the format of its suffix. ``option`` is for error sentences.

    ``key_names`` and ``label_names`` are names of columns, in lower case. If the first line has none of ``key_names``
    but the name of an image, it is a row, not a header. Numbers in a column of ``label_names`` become names of classes
    if a JSON document lists these beside the table.

    Raises:
        StorageError: the file cannot be read.
        UsageError: the file does not contain a table in the format of its suffix.
    """
    # Refuse files that cannot be a table, with a sentence that says what they are.
    content = read_input(url, option)
    suffix = posixpath.splitext(url)[1].lower()
    if suffix not in _FORMATS:
        raise UsageError(f"The label file is {url!r}; its name must end in {', '.join(_FORMATS)}.")
    if compression := next((name for magic, name in _COMPRESSIONS.items() if content.startswith(magic)), None):
        raise UsageError(
            f"The label file {url} is not in UTF-8, but compressed with {compression}; decompress it, and save it as "
            "text in UTF-8 or as Parquet."
        )
    if content.startswith(LFS_POINTER):
        raise UsageError(f"The label file {url} is a pointer of Git LFS; fetch the file with `git lfs pull`.")
    if suffix != ".parquet" and content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise UsageError(
            f"The label file {url} is HTML or XML, such as a page of a web server that asks to log in, and no table; "
            "fetch it again, or write a table."
        )
    text = "" if suffix == ".parquet" else _decode_text(url, content)

    # The readers raise the exceptions of their libraries if the file is damaged, or of another form.
    try:
        if suffix == ".parquet":
            table = read_columns(content)
            while any(map(pa.types.is_struct, table.schema.types)):
                table = table.flatten()
            return table
        if suffix.startswith(".json"):
            return _read_json(text, suffix, key_names, label_names)
        return _read_lines(text, suffix, key_names)
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        missing = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        reason = missing.partition("\n")[0].rstrip(".")
        raise UsageError(f"The label file {url} cannot be read as a table ({reason}); correct the file.") from None


def _decode_text(url: str, content: bytes) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a mark at its beginning; UsageError for anything else."""
    try:
        text = content.decode("utf-16" if content.startswith(_UTF_16_MARKS) else "utf-8-sig")
    except UnicodeDecodeError as error:
        position, byte = error.start, error.object[error.start]
    else:
        position, byte = text.find("\0"), 0  # zeros occur in UTF-16 without a mark, and in binary files
        if position < 0:
            return text
    raise UsageError(
        f"The label file {url} is not in UTF-8 (byte {position:,} is {byte:#x}); save it as text in UTF-8."
    )


# Lines.


def _read_lines(text: str, suffix: str, key_names: Set[str]) -> pa.Table:
    """Read columns that are separated by commas, semicolons, tabs or bars, or else by blanks.

    Raises ValueError, such as pa.ArrowInvalid, if the lines have different numbers of columns.
    """
    # Skip comments: lines at the top that begin with #, unless they name an image, or the last one names a column, as
    # NumPy and others write "# path,label".
    while (text := text.lstrip("\r\n")).startswith("#"):
        line, *rest = _LINES.split(text, maxsplit=1)
        following = "".join(rest)
        next_words = _BETWEEN_WORDS.split(following.partition("\n")[0])
        is_last = not next_words[0].startswith("#") and not _is_header(next_words, key_names)

        words, without_sign = _BETWEEN_WORDS.split(line), _REMARK.sub("", line, count=1)
        if any(map(_is_image, words)):
            break
        if is_last and _is_header(_BETWEEN_WORDS.split(without_sign), key_names):
            text = f"{without_sign}\n{following}"
            break
        if is_last and _is_header(words, key_names):
            break
        text = following

    # Excel reads, and some programs write, the delimiter in a line of its own: sep=;
    if said := _DELIMITER_LINE.match(text):
        text = text[said.end() :]
        return _read_csv(text, said[1], suffix, key_names, sum(1 for line in _LINES.split(text) if line.strip()))

    # The delimiter is the most frequent candidate in the first line; in a .tsv it is the tab if that has one. In a list
    # (.txt), it must be in all lines.
    lines = [line for line in _LINES.split(text.strip()) if line.strip()]
    header = re.sub('"[^"]*"', "", lines[0] if lines else "")
    if lines and '"' in lines[0] and not header.strip():  # "path" "label", as R's write.table has it
        return _read_csv(text, " ", suffix, key_names, len(lines))
    delimiter = "\t" if suffix == ".tsv" and "\t" in header else max(",;\t|", key=header.count)
    lines_with_delimiter = lines if suffix == ".txt" else lines[:1]  # others may have ends of lines in quoted texts
    if lines and not all(delimiter in line for line in lines_with_delimiter):
        words = lines[0].split()
        is_title = not _is_header(words, key_names) and not any(map(_is_image, words))
        if suffix != ".txt" and is_title and len(lines) > 1 and any(map(lines[1].count, ",;\t|")):
            raise ValueError(
                f"its first line, {lines[0][:80]!r}, has no names of columns; remove what stands above these"
            )
        return _read_spaced(lines, key_names)
    return _read_csv(text, delimiter, suffix, key_names, len(lines))


def _read_csv(text: str, delimiter: str, suffix: str, key_names: Set[str], num_lines: int) -> pa.Table:
    """Read columns that are separated by ``delimiter``, all as text: 007 is not 7.

    ``num_lines`` counts the lines of the text that are not empty. Raises ValueError, such as pa.ArrowInvalid, if the
    rows have different numbers of columns, or a quotation mark is not closed.
    """
    content = text.encode()
    read = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES)
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)

    # Read the names first: only with them can Arrow be told that each column is text. If the first line is a row, give
    # the columns names.
    names = pyarrow.csv.open_csv(io.BytesIO(content), read, parse).schema.names
    has_header = _is_header(names, key_names) or not (suffix == ".txt" or any(map(_is_image, names)))
    if not has_header:
        read.column_names = names = _invented_names(names)
    as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    table = pyarrow.csv.read_csv(io.BytesIO(content), read, parse, as_text)

    # A row has several lines if a text in quotes does. So has one whose quotes are not closed: Arrow puts all rows up
    # to the next quotation mark into one text, which would be the name of a class.
    if len(table) + has_header < num_lines:
        _check_quotes(text, delimiter)

    # Arrow keeps quotation marks behind a blank, and those of ="007", a text of Excel, as parts of a value.
    names = [_QUOTED.sub(r"\1", name).strip() for name in table.column_names]
    columns = [pc.replace_substring_regex(column, _QUOTED.pattern, r"\1") for column in table.columns]
    return pa.Table.from_arrays(columns, names)


def _check_quotes(text: str, delimiter: str) -> None:
    """Raise ValueError, with the line, if a quotation mark begins a value and none ends it."""
    # A mark begins a value only directly after a delimiter or at the start of a line. Two marks within stand for one.
    begins, ends = rf"(?:\A|(?<=[{delimiter}\r\n]))", rf"[ \t]*(?=[{delimiter}\r\n]|\Z)"
    for value in re.finditer(rf'{begins}"(?P<closed>[^"]*(?:""[^"]*)*"{ends})?', text):
        if value["closed"] is None:
            line = re.split(r"[\r\n]", text[: value.start()])[-1] + re.split(r"[\r\n]", text[value.start() :])[0]
            raise ValueError(f"the line {line[:80]!r} has a quotation mark that begins a value, and none ends it")


def _read_spaced(lines: Sequence[str], key_names: Set[str]) -> pa.Table:
    """Read columns that are separated by blanks. The path of an image may contain blanks itself, and so may its label
    if the path ends like an image.

    Raises ValueError if a line has fewer columns than the others.
    """
    names = lines[0].split()
    has_header = _is_header(names, key_names)
    if has_header:
        num_columns = len(names)
    elif len({len(line.split()) for line in lines}) > 1:
        # Blanks in paths or labels give the lines different numbers of words: a line is a path, or a path and a label,
        # which is what comes behind the last word that ends like an image, or else the last word.
        num_columns = 1 if all(map(_is_image, lines)) else 2
        matches = [_IMAGE_AND_LABEL.fullmatch(line.strip()) for line in lines]
        if num_columns == 2 and all(matches):
            rows = [match.groups() for match in matches if match is not None]
            columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            return pa.Table.from_arrays(columns, ["key", "label"])
    elif len(names) > 1 and any(_is_image(line.rsplit(None, 1)[0]) for line in lines):
        # What comes before the last word of a line ends like an image: it is a path, and the last word is its label.
        num_columns = 2
    else:
        num_columns = len(names)
    rows = [line.rsplit(None, num_columns - 1) for line in lines]
    for number, row in enumerate(rows, 1):
        if len(row) != num_columns:
            raise ValueError(
                f"line {number:,} is {lines[number - 1][:80]!r}, but should have {format_count(num_columns, 'column')}"
            )
    names = rows.pop(0) if has_header else _invented_names(rows[0])
    columns = [pa.array([row[index] for row in rows], pa.string()) for index in range(num_columns)]
    return pa.Table.from_arrays(columns, names)


def _is_header(names: Sequence[str], key_names: Set[str]) -> bool:
    """Return True if one of ``names`` is that of a column of keys."""
    return any(name.strip().lower() in key_names for name in names)


def _is_image(text: object) -> bool:
    """Return True if a value ends like the name of an image."""
    return isinstance(text, str) and text.strip().lower().endswith(SUFFIXES)


def _invented_names(row: Sequence[object]) -> list[str]:
    """Return names for the columns of a table without a header: key for the column of images, label for the other one
    of two columns, and numbers for more.
    """
    key = next((index for index, text in enumerate(row) if _is_image(text)), 0)
    names = [f"column {number}" if len(row) > 2 else "label" for number in range(1, len(row) + 1)]
    return [*names[:key], "key", *names[key + 1 :]]


# JSON.


def _read_json(text: str, suffix: str, key_names: Set[str], label_names: Set[str]) -> pa.Table:
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
    records = list(map(_flat, records))
    columns = dict.fromkeys(name for record in records for name in record)
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
    rest = {name: value for name, value in document.items() if name not in _CLASS_NAMES}
    has_table = any(_is_list_of(value, (dict, list)) or _is_by_image(value) for value in rest.values())
    has_tables_of_parts = bool(rest) and all(map(is_part, rest))
    name = next((name for name in _CLASS_NAMES if isinstance(document.get(name), (dict, list))), None)
    if not (has_table or has_tables_of_parts):
        # FiftyOne writes {"classes": […], "labels": {"0001": 1}}, with names of images without their suffixes.
        objects = [value for value in rest.values() if isinstance(value, dict)]
        has_table = len(objects) == 1 and all(isinstance(label, str) for label in objects[0].values())
        rest = objects[0] if has_table else rest
    if name is None or not (has_table or has_tables_of_parts):
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
    return rest, names


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

    # Otherwise it is an object by image or by class, or holds a single one by image.
    by_image = [value for value in document.values() if _is_by_image(value)]
    return _keyed_records(by_image[0] if len(by_image) == 1 else document, key_names)


def _keyed_records(document: _Record, key_names: Set[str]) -> list[_Record]:
    """Return the rows of an object that has columns by name, records or labels by image, or images by class."""
    values = list(document.values())
    # Columns by name: lists or, as pandas writes them, objects with the row's number as name.
    if all(isinstance(value, (dict, list)) for value in values) and _is_header(list(document), key_names):
        columns = [value if isinstance(value, dict) else dict(enumerate(value)) for value in values]
        if any(column.keys() != columns[0].keys() for column in columns):
            raise ValueError(f"its columns have {min(map(len, columns)):,} to {max(map(len, columns)):,} values")
        return [{name: column[row] for name, column in zip(document, columns, strict=True)} for row in columns[0]]
    # Records by image, or by anything else if each record names its image.
    if all(isinstance(value, dict) for value in values):
        has_keys = all(_is_header(list(record), key_names) for record in values)
        return values if has_keys else [{"key": name, **record} for name, record in document.items()]

    # Lists of images by class, of which some may be empty, also by paths without suffixes; else the label by image.
    def is_path(value: object) -> bool:
        return _is_image(value) or (isinstance(value, str) and "/" in value and not any(map(_is_image, document)))

    if any(values) and all(isinstance(value, list) and all(map(is_path, value)) for value in values):
        return [{"key": key, "label": name} for name, keys in document.items() for key in keys]
    return [{"key": name, "label": label} for name, label in document.items()]


def _coco_records(images: list[_Record], annotations: list[_Record], **rest: Any) -> list[_Record]:
    """Return the images of a COCO document as rows, each with the list of its categories as label.

    Without names of categories, their ids are the labels. Raises ValueError if ids or names are not unique, or an
    annotation has an id of no image or category.
    """
    names = {category["id"]: category["name"] for category in rest.get("categories", ())}
    labels = {image["id"]: list[str]() for image in images}
    if len(labels) < len(images) or len(set(names.values())) < len(rest.get("categories", ())):
        raise ValueError("several of its images have one id, or several of its categories one id or name")
    for annotation in annotations:
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in labels or (names and category not in names):
            raise ValueError(f"an annotation of the image {image} and the category {category} has an id not in a list")
        name = names[category] if names else category
        if name not in labels[image]:
            labels[image].append(name)
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
        numbers = dict.fromkeys(each["label_id"] for each in item["annotations"] if "label_id" in each)
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
        return _records_of_lists(_invented_names(rows[0]), rows)
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
    return isinstance(value, dict) and bool(value) and all(map(_is_image, value))


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


def _text(value: Any) -> str | None:
    """Return a value of JSON as the text of a label file, in which numbers are texts already; None for null."""
    return str(value).lower() if isinstance(value, bool) else value
