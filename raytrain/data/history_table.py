"""A run's metrics as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from raytrain.data.table_file import encode_table
from raytrain.runs.documents import open_run
from raytrain.runs.history import read_metrics
from raytrain.runs.metric_row import MetricRow
from raytrain.storage.output_file import check_output, write_output


def export_history(storage: str, name: str, output: str) -> int:
    """Write the history of a run into the file ``output``, .csv or .parquet; returns the number of rows."""
    check_output(output, (".parquet", ".csv"))
    rows = read_metrics(open_run(storage, name))
    write_output(output, encode_table(history_table(rows), output))
    return len(rows)


def history_table(rows: Sequence[MetricRow]) -> pa.Table:
    """A row for each of ``rows``, a column for each name that occurs in them; what a row lacks is null."""
    documents = [row.to_json() for row in rows]
    names = list(dict.fromkeys(name for document in documents for name in document))
    columns = {name: [document.get(name) for document in documents] for name in names}
    return pa.table({name: pa.array(values, _type_of(values)) for name, values in columns.items()})


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """A float if a column has whole numbers and others, or nothing at all; otherwise what pyarrow makes of it."""
    found = {type(value) for value in values if value is not None}
    return pa.float64() if found in (set(), {int, float}) else None
