"""A run's metrics as a table, of any length in a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from raytrain.data.table_file import table_writer
from raytrain.errors import UsageError
from raytrain.runs.documents import open_run
from raytrain.runs.history import read_all_metrics
from raytrain.runs.metric_row import MetricRow
from raytrain.storage.output_file import check_output, new_output

_MAX_COLUMNS = 1000
_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64()}


def export_history(storage: str, name: str, output: str) -> int:
    """Write the history of a run into the file ``output``, .csv or .parquet; returns the number of rows.

    Each row of the history is a row, each name that occurs in it a column. What a row lacks is null.
    """
    check_output(output, (".parquet", ".csv"))
    store = open_run(storage, name)
    num_rows, schema = _survey(read_all_metrics(store))
    num_left = num_rows
    with new_output(output) as file, table_writer(file, output, schema) as write:
        for rows in read_all_metrics(store):
            write(_table(rows[:num_left], schema))  # a run that trains adds rows meanwhile
            num_left -= len(rows[:num_left])
    return num_rows


def _survey(parts: Iterable[Sequence[MetricRow]]) -> tuple[int, pa.Schema]:
    """The number of rows, and the columns with their types. Raises UsageError if there are too many of them."""
    num_rows, found = 0, dict[str, set[type]]()
    for rows in parts:
        num_rows += len(rows)
        for row in rows:
            for name, value in row.to_json().items():
                found.setdefault(name, set()).add(type(value))
        if len(found) > _MAX_COLUMNS:
            raise UsageError(f"The history names {len(found):,} metrics; a table has at most {_MAX_COLUMNS:,} columns.")
    return num_rows, pa.schema([(name, _column_type(types)) for name, types in found.items()])


def _column_type(types: set[type]) -> pa.DataType:
    """Float if a column has whole numbers and others, or if nothing is known of it."""
    known = types - {type(None)}
    return _TYPES[known.pop()] if len(known) == 1 else pa.float64()


def _table(rows: Sequence[MetricRow], schema: pa.Schema) -> pa.Table:
    documents = [row.to_json() for row in rows]
    columns = [pa.array([document.get(field.name) for document in documents], field.type) for field in schema]
    return pa.table(columns, schema=schema)
