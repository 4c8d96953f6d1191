"""Tables as files, CSV or Parquet, and `raytrain export-history`."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from raytrain.errors import UsageError
from raytrain.runs.documents import open_run
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.stored_rows import FIELDS, StoredRows, read_rows
from raytrain.storage.open import check_output, new_output
from raytrain.storage.store import Store

pc: Any = pyarrow.compute  # whose functions are made at import
_FORMULA = r"^[=+\-@\t\r\n]"
_MAX_COLUMNS = 1000
_VALUE = {pa.string(): str, pa.int64(): int, pa.float64(): float}


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


def export_history(storage: str, name: str, output: str) -> int:
    """Write the history of a run into the file ``output``, .csv or .parquet; returns the number of rows.

    Each row of the history is a row, each name that occurs in it a column. What a row lacks is null.
    """
    check_output(output, (".parquet", ".csv"))
    store = open_run(storage, name)
    num_rows, schema = _survey(store)
    num_left = num_rows
    with new_output(output) as file, table_writer(file, output, schema) as write:
        for rows in read_rows(store):
            write(_table(rows[:num_left], schema))  # a run that trains adds rows meanwhile
            num_left -= len(rows[:num_left])
    return num_rows


def _survey(store: Store) -> tuple[int, pa.Schema]:
    """The number of rows, and the columns with their types. Raises UsageError if there are too many of them."""
    num_rows, names = 0, dict[str, None]()
    for rows in read_rows(store):
        num_rows += len(rows)
        names.update(dict.fromkeys(_names(rows)))
        if len(names) > _MAX_COLUMNS:
            raise UsageError(f"The history names {len(names):,} metrics; a table has at most {_MAX_COLUMNS:,} columns.")
    return num_rows, pa.schema([(name, FIELDS.get(name, pa.float64())) for name in names])


def _names(rows: Sequence[MetricRow]) -> Iterator[str]:
    """The columns of some rows, in the order in which they occur."""
    if isinstance(rows, StoredRows):
        return (name for name in rows.table.column_names if rows.table[name].null_count < len(rows))
    return (name for row in rows for name in row.to_json())


def _table(rows: Sequence[MetricRow], schema: pa.Schema) -> pa.Table:
    if isinstance(rows, StoredRows):
        known = rows.table.column_names
        columns = [
            rows.table[name] if name in known else pa.nulls(len(rows), schema.field(name).type) for name in schema.names
        ]
    else:
        documents = [row.to_json() for row in rows]
        columns = [_column([document.get(field.name) for document in documents], field.type) for field in schema]
    return pa.table(columns, schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values of a history, which may be whole numbers and others in turn, as a column of one type."""
    return pa.array([None if value is None else _VALUE[kind](value) for value in values], kind)
