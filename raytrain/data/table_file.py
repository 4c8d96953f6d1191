"""Tables as files: Parquet with the exact values, CSV that a spreadsheet may open."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

pc: Any = pyarrow.compute  # whose functions are made at import
_FORMULA = r"^[=+\-@\t\r\n]"


def encode_table(table: pa.Table, output: str) -> bytes:
    """The content of the file ``output``, in the format of its suffix, .csv or .parquet."""
    sink = pa.BufferOutputStream()
    with table_writer(sink, output, table.schema) as write:
        write(table)
    return sink.getvalue().to_pybytes()


@contextmanager
def table_writer(sink: Any, output: str, schema: pa.Schema) -> Generator[Callable[[pa.Table], None]]:
    """A function that adds tables of ``schema`` to ``sink``, a path or a stream, in the format of ``output``."""
    if output.endswith(".csv"):
        with pyarrow.csv.CSVWriter(sink, _without_formulas(schema.empty_table()).schema) as writer:
            yield lambda table: writer.write_table(_without_formulas(table))
    else:
        with pyarrow.parquet.ParquetWriter(sink, schema) as writer:
            yield writer.write_table


def _without_formulas(table: pa.Table) -> pa.Table:
    """The table with an apostrophe before each text that a spreadsheet would compute, as OWASP advises for CSV."""
    for place, name in enumerate(table.column_names):
        if pa.types.is_string(table[name].type):
            is_formula = pc.match_substring_regex(table[name], _FORMULA)
            quoted = pc.binary_join_element_wise(pa.scalar("'"), table[name], pa.scalar(""))
            table = table.set_column(place, name, pc.if_else(is_formula, quoted, table[name]))
    return table.rename_columns([f"'{name}" if re.match(_FORMULA, name) else name for name in table.column_names])
