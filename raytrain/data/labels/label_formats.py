"""Tables in label files (CSV, lists in lines, JSON, Parquet), with each value as the text that stands in the file.

People write labels in many forms, and none of them says which one it is. :func:`read_table` takes the suffix for a
hint only. ``label_csv.py`` says how lines become a table, ``label_json.py`` how JSON does. A struct of Parquet, or an
object in a cell of lines, is a column for each of its fields, called by its path, such as ground_truth.label.

Values stay texts throughout: 007 is not 7, and 3.0 is not 3.
"""

from __future__ import annotations

import posixpath
from collections.abc import Set

import pyarrow as pa

from raytrain.data.labels.class_names import names_in_metadata, names_of_numbers
from raytrain.data.labels.label_csv import read_lines
from raytrain.data.labels.label_json import read_json, with_columns_of_objects
from raytrain.data.labels.listing import LFS_POINTER
from raytrain.data.parquet_size import read_columns
from raytrain.errors import UsageError
from raytrain.storage.open import read_input

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # label files of Hugging Face's image folders
KEY_COLUMNS = ("key", "path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "category")

_FORMATS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet")
_FORMAT_OF_SUFFIX = {".manifest": ".jsonl", ".ndjson": ".jsonl", ".lst": ".txt"}  # of SageMaker and MXNet, among others
_UTF_16_MARKS = b"\xff\xfe", b"\xfe\xff"
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"(\xb5/\xfd": "zstd",
    b"PK\3\4": "ZIP, as spreadsheets are",
}


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
    suffix = _FORMAT_OF_SUFFIX.get(suffix, suffix)
    if suffix not in _FORMATS:
        raise UsageError(
            f"The label file is {url!r}; its name must end in {', '.join([*_FORMATS, *_FORMAT_OF_SUFFIX])}."
        )
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
            return _with_class_names(table, url)
        if suffix.startswith(".json"):
            return read_json(text, suffix, key_names, label_names)
        return with_columns_of_objects(read_lines(text, suffix, key_names), label_names)
    except UsageError:
        raise
    except KeyError as error:
        reason = f"there is no {error}"
    except (TypeError, AttributeError):  # a text where an object should be, say: Python's words would not help
        reason = "its objects and lists are nested in a form that is not known"
    except (ValueError, OSError, RecursionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
    raise UsageError(f"The label file {url} cannot be read as a table ({reason}); correct the file.")


def _with_class_names(table: pa.Table, url: str) -> pa.Table:
    """Return a table with the names of classes in place of their numbers where the metadata of the file has the names.

    Raises UsageError if a number has no name.
    """
    for index, field in enumerate(table.schema):
        if names := names_in_metadata(table.schema, field):
            labels = names_of_numbers(table.column(index).to_pylist(), names, f"The label file {url}")
            table = table.set_column(index, field.name, pa.array(labels, pa.string()))
    return table


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
