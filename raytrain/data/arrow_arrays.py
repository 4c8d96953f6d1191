"""Arrow arrays from and to Python and numpy without pandas, which pyarrow's own conversions import: a second or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def string_array(values: Sequence[str | None]) -> pa.LargeStringArray:
    """Text, None for null. Raises UnicodeEncodeError for text that is not valid Unicode."""
    encoded = [b"" if value is None else value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    valid = None
    if None in values:
        valid = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)), valid)


def number_array(values: npt.NDArray[Any]) -> pa.Array:
    """Numbers (n,), without a copy if they are contiguous."""
    contiguous = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """The numbers (n,) of a column without nulls."""
    return np.from_dlpack(column.combine_chunks())
