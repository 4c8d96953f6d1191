"""Reads Parquet files from strangers, in which a few kilobytes may expand to gigabytes of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

pc: Any = pyarrow.compute  # whose functions are made at import
_MAX_RATIO = 300
"""Keys with long prefixes in common compress a hundredfold. Equal rows are stored once, however many there are."""
_MAX_BYTES = 64 << 20  # of memory that any file may take, however small it is
_ROWS_AT_A_TIME = 1 << 16
_STRING = "BYTE_ARRAY"
_VALUE_BYTES = {"INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, _STRING: 8, "FIXED_LEN_BYTE_ARRAY": 16}
"""Bytes of a value in memory by Parquet's type; of a string, those of its offset. A type may have a larger length."""


def read_columns(data: bytes, names: Sequence[str] | None = None) -> pa.Table:
    """Return the columns ``names`` of a file, as far as it has them, or all columns.

    The columns that ``names`` has must hold numbers or strings; without ``names``, columns may hold anything.

    Raises ValueError if they would take too much memory (a file may take 64 MiB, or 300 times its own size) or a named
    column holds something else, and Arrow's exceptions if the file is damaged.

    Example:
        >>> read_columns(manifest, ["key", "label"])["key"]
    """
    file = pq.ParquetFile(pa.BufferReader(data))
    fields = [field for field in file.schema_arrow if names is None or field.name in names]
    for field in fields if names is not None else ():
        is_string = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        if not is_string and not pa.types.is_primitive(field.type):
            raise ValueError(f"its column {field.name} holds {field.type}")

    # First check what the file says of itself: its size without compression, and how many values it has. A column of
    # lists or of records is stored in several columns of single values.
    chosen = {field.name for field in fields}
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    check_memory(sum(group.total_byte_size for group in groups), data)
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.partition(".")[0] in chosen]
    length_of = {column.path: column.length for column in map(file.schema.column, range(len(file.schema)))}
    num_bytes = sum(
        column.num_values * max(_VALUE_BYTES.get(column.physical_type, 1), length_of[column.path_in_schema])
        for column in columns
    )
    check_memory(num_bytes, data)

    # Then the strings. One that occurs often is stored once in the file; read as a dictionary, it takes little memory.
    strings = sorted({column.path_in_schema for column in columns if column.physical_type == _STRING})
    as_dictionaries = pq.ParquetFile(pa.BufferReader(data), read_dictionary=strings)
    for batch in as_dictionaries.iter_batches(_ROWS_AT_A_TIME, columns=strings) if strings else ():
        num_bytes += sum(map(_bytes_of_strings, batch.columns))
        check_memory(num_bytes, data)
    return file.read(columns=[field.name for field in fields])


def _bytes_of_strings(column: Any) -> int:
    """Return the bytes that the strings in ``column`` take if each is stored by itself; lists and records included."""
    if pa.types.is_dictionary(column.type):
        return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    if pa.types.is_struct(column.type):
        return sum(map(_bytes_of_strings, column.flatten()))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _bytes_of_strings(column.flatten())
    return column.nbytes


def check_memory(num_bytes: int, data: bytes) -> None:
    """Raise ValueError if ``num_bytes`` is more memory than the table in the file ``data`` may take."""
    limit = max(_MAX_BYTES, _MAX_RATIO * len(data))
    if num_bytes > limit:
        raise ValueError(
            f"its {len(data):,} bytes would take over {num_bytes / 1e6:,.0f} MB of memory, and may take "
            f"{limit / 1e6:,.0f} MB"
        )
