"""Parquet files from outside, of which some kilobytes may stand for gigabytes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

pc: Any = pyarrow.compute  # whose functions are made at import
_MAX_RATIO = 300
"""Keys with long prefixes in common compress a hundredfold. Equal rows are stored once, however many there are."""
_MAX_BYTES = 64 << 20  # what any file may take in memory
_ROWS_AT_A_TIME = 1 << 16
_OFFSET_BYTES = 8  # of a string, beside its characters


def read_columns(data: bytes, names: list[str]) -> pa.Table:
    """Return those of the columns ``names`` that a file has. Raise ValueError if they would take too much memory.

    A file may take 64 MiB, or 300 times its own size.

    Example:
        >>> read_columns(manifest, ["key", "label"])["key"]
    """
    file = pq.ParquetFile(pa.BufferReader(data))
    fields = [field for field in file.schema_arrow if field.name in names]
    strings = [field.name for field in fields if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]

    # What the file says itself: its size without compression, and the numbers and offsets of its rows.
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    check_memory(sum(group.total_byte_size for group in groups), data)
    for field in fields:
        if field.name not in strings and not pa.types.is_primitive(field.type):
            raise ValueError(f"its column {field.name} holds {field.type}")
    row_bytes = sum(_OFFSET_BYTES if field.name in strings else field.type.bit_width // 8 for field in fields)
    num_bytes = file.metadata.num_rows * row_bytes
    check_memory(num_bytes, data)

    # A string that occurs often is in the file once. Read like that, it takes little memory, too.
    once = pq.ParquetFile(pa.BufferReader(data), read_dictionary=strings)
    for batch in once.iter_batches(_ROWS_AT_A_TIME, columns=strings) if strings else ():
        for column in batch.columns:
            num_bytes += pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
        check_memory(num_bytes, data)
    return file.read(columns=[field.name for field in fields])


def check_memory(num_bytes: int, data: bytes) -> None:
    """Raise ValueError if ``num_bytes`` is more memory than what is made of the file ``data`` may take."""
    limit = max(_MAX_BYTES, _MAX_RATIO * len(data))
    if num_bytes > limit:
        raise ValueError(
            f"its {len(data):,} bytes would take over {num_bytes / 1e6:,.0f} MB of memory, and may take "
            f"{limit / 1e6:,.0f} MB"
        )
