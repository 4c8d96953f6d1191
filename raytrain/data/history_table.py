"""A run's metrics as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from raytrain.data.table_file import encode_table
from raytrain.runs.documents import open_run
from raytrain.runs.history import read_all_metrics
from raytrain.runs.metric_row import MetricRow
from raytrain.storage.output_file import check_output, write_output


def export_history(storage: str, name: str, output: str) -> int:
    """Write the history of a run into the file ``output``, .csv or .parquet; returns the number of rows."""
    check_output(output, (".parquet", ".csv"))
    table = history_table(read_all_metrics(open_run(storage, name)))
    write_output(output, encode_table(table, output))
    return table.num_rows


def history_table(blocks: Iterable[Sequence[MetricRow]]) -> pa.Table:
    """A row for each of those in ``blocks``, a column for each name that occurs in them; what a row lacks is null."""
    tables = [pa.table({}), *map(_table, blocks)]
    table = pa.concat_tables(tables, promote_options="permissive")  # int and float become float
    unknown = [name for name in table.column_names if pa.types.is_null(table[name].type)]
    for name in unknown:
        table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.float64()))
    return table


def _table(rows: Sequence[MetricRow]) -> pa.Table:
    documents = [row.to_json() for row in rows]
    names = list(dict.fromkeys(name for document in documents for name in document))
    columns = {name: [document.get(name) for document in documents] for name in names}
    return pa.table({name: pa.array(values, _type_of(values)) for name, values in columns.items()})


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """A float if a column has whole numbers and others; otherwise what pyarrow makes of it."""
    found = {type(value) for value in values if value is not None}
    return pa.float64() if found == {int, float} else None
