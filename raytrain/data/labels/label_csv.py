"""Tables in lines: label files in CSV or TSV, and lists in .txt, with a header or without one.

Columns are between commas, semicolons, tabs or bars, or else between blanks. Without a header, the column of images is
called key.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence, Set
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from raytrain.data.labels.listing import SUFFIXES
from raytrain.errors import format_count

pc: Any = pyarrow.compute  # whose functions are made at import

_BLOCK_BYTES = 64 << 20  # the longest row that is read, such as one with a mask
_LINES = re.compile(r"[\r\n]+")
_DELIMITER_LINE = re.compile(r"sep=([,;\t|])[\r\n]+", re.IGNORECASE)
_QUOTED = re.compile(r'^\s*=?"([^"]*)"\s*$')
_IMAGE_AND_LABEL = re.compile(rf"(.*(?:{'|'.join(map(re.escape, SUFFIXES))}))\s+(\S.*)", re.IGNORECASE)
_REMARK = re.compile(r"#+\s*(?=\w)")
_BETWEEN_WORDS = re.compile(r"[\s,;|]+")


def read_lines(text: str, suffix: str, key_names: Set[str]) -> pa.Table:
    """Read columns that are separated by commas, semicolons, tabs or bars, or else by blanks.

    Raises ValueError, such as pa.ArrowInvalid, if the lines have different numbers of columns.
    """
    text = _without_remarks(text, key_names)

    # Excel reads, and some programs write, the delimiter in a line of its own: sep=;
    stated = _DELIMITER_LINE.match(text)
    text = text[stated.end() :] if stated else text
    lines = [line for line in _LINES.split(text.strip()) if line.strip()]
    if stated:
        return _read_csv(text, stated[1], suffix, key_names, len(lines))

    # R's write.table has all texts in quotes, between blanks: "path" "label"
    header = re.sub('"[^"]*"', "", lines[0] if lines else "")
    if lines and '"' in lines[0] and not header.strip():
        return _read_csv(text, " ", suffix, key_names, len(lines))

    # The delimiter is the most frequent candidate in the first line; in a .tsv it is the tab if that has one. In a list
    # (.txt), it must be in all lines; others may have ends of lines in quoted texts.
    delimiter = "\t" if suffix == ".tsv" and "\t" in header else max(",;\t|", key=header.count)
    if all(delimiter in line for line in (lines if suffix == ".txt" else lines[:1])):
        return _read_csv(text, delimiter, suffix, key_names, len(lines))

    # Columns are between blanks, unless the first line is a title, above names between other signs.
    words = lines[0].split()
    is_title = not is_header(words, key_names) and not any(map(is_image, words))
    if suffix != ".txt" and is_title and len(lines) > 1 and any(map(lines[1].count, ",;\t|")):
        raise ValueError(f"its first line, {lines[0][:80]!r}, has no names of columns; remove what stands above these")
    return _read_spaced(lines, key_names)


def _without_remarks(text: str, key_names: Set[str]) -> str:
    """Return a text without the lines at its beginning that begin with #, as remarks do.

    A line stays if it names an image, or is the last of these and names a column, as in "#,path,label". It loses the
    sign in "# path,label", as NumPy and others write names of columns.
    """
    while (text := text.lstrip("\r\n")).startswith("#"):
        line, *rest = _LINES.split(text, maxsplit=1)
        following = "".join(rest)
        words, without_sign = _BETWEEN_WORDS.split(line), _REMARK.sub("", line, count=1)
        if any(map(is_image, words)):
            break
        next_words = _BETWEEN_WORDS.split(following.partition("\n")[0])
        is_last = not next_words[0].startswith("#") and not is_header(next_words, key_names)
        if is_last and is_header(_BETWEEN_WORDS.split(without_sign), key_names):
            return f"{without_sign}\n{following}"
        if is_last and is_header(words, key_names):
            break
        text = following
    return text


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
    has_header = is_header(names, key_names) or not (suffix == ".txt" or any(map(is_image, names)))
    if not has_header:
        read.column_names = names = invented_names(names)
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
    has_header = is_header(names, key_names)
    if has_header:
        num_columns = len(names)
    elif len({len(line.split()) for line in lines}) > 1:
        # Blanks in paths or labels give the lines different numbers of words: a line is a path, or a path and a label,
        # which is what comes behind the last word that ends like an image, or else the last word.
        num_columns = 1 if all(map(is_image, lines)) else 2
        matches = [_IMAGE_AND_LABEL.fullmatch(line.strip()) for line in lines]
        if num_columns == 2 and all(matches):
            rows = [match.groups() for match in matches if match is not None]
            columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            return pa.Table.from_arrays(columns, ["key", "label"])
    elif len(names) > 1 and any(is_image(line.rsplit(None, 1)[0]) for line in lines):
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
    names = rows.pop(0) if has_header else invented_names(rows[0])
    columns = [pa.array([row[index] for row in rows], pa.string()) for index in range(num_columns)]
    return pa.Table.from_arrays(columns, names)


def is_header(names: Sequence[str], key_names: Set[str]) -> bool:
    """Return True if one of ``names`` is that of a column of keys."""
    return any(name.strip().lower() in key_names for name in names)


def is_image(text: object) -> bool:
    """Return True if a value ends like the name of an image."""
    return isinstance(text, str) and text.strip().lower().endswith(SUFFIXES)


def invented_names(row: Sequence[object]) -> list[str]:
    """Return names for the columns of a table without a header: key for the column of images, label for the other one
    of two columns, and numbers for more.
    """
    key = next((index for index, text in enumerate(row) if is_image(text)), 0)
    names = [f"column {number}" if len(row) > 2 else "label" for number in range(1, len(row) + 1)]
    return [*names[:key], "key", *names[key + 1 :]]


def is_invented_name(name: str) -> bool:
    """Return True if :func:`invented_names` calls a column so, which is neither that of keys nor surely of labels."""
    return re.fullmatch(r"column \d+", name) is not None
