"""Tables as files, CSV or Parquet, and the history of a run as one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from raytrain.config.option_values import Location
from raytrain.errors import UsageError
from raytrain.runs.documents import open_single_run
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.stored_rows import FIELDS, StoredRows, read_rows
from raytrain.storage.open import check_output, new_output

pc: Any = pyarrow.compute  # whose functions are made at import
_FORMULA = r"^[=+\-@\t\r\n]"  # the beginning of a text that a spreadsheet computes
_MAX_COLUMNS = 1000
_PYTHON_TYPE = {pa.string(): str, pa.int64(): int, pa.float64(): float}


def encode_table(table: pa.Table, output: str) -> bytes:
    """Encode a table in the format that the suffix of ``output`` names, .csv or .parquet."""
    sink = pa.BufferOutputStream()
    with table_writer(sink, output, table.schema) as write:
        write(table)
    return sink.getvalue().to_pybytes()


@contextmanager
def table_writer(sink: Any, output: str, schema: pa.Schema) -> Generator[Callable[[pa.Table], None]]:
    """Yield a function that adds tables of ``schema`` to ``sink``, a path or a stream, as .csv if ``output`` ends so.

    Otherwise, it writes Parquet. Texts that a spreadsheet would compute are quoted in CSV.
    """
    if output.endswith(".csv"):
        with pyarrow.csv.CSVWriter(sink, _without_formulas(schema.empty_table()).schema) as writer:
            yield lambda table: writer.write_table(_without_formulas(table))
    else:
        with pyarrow.parquet.ParquetWriter(sink, schema) as writer:
            yield writer.write_table


def _without_formulas(table: pa.Table) -> pa.Table:
    """Return a table with an apostrophe before each text that a spreadsheet would compute, as OWASP advises for CSV."""
    for index, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        # Class names and errors are large_string, keys are string.
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            is_formula = pc.match_substring_regex(column, _FORMULA)
            quote, nothing = (pa.scalar(text, column.type) for text in ("'", ""))
            quoted = pc.binary_join_element_wise(quote, column, nothing)
            table = table.set_column(index, name, pc.if_else(is_formula, quoted, column))
    return table.rename_columns([f"'{name}" if re.match(_FORMULA, name) else name for name in table.column_names])


def history(name: str, *, storage: Location = "./runs") -> list[dict[str, Any]]:
    """Return the metrics of a run, also of one that still trains: a row for each logged step and each evaluation.

    A row is a dictionary: its ``kind`` is ``step``, ``evaluation`` or ``test``; ``step`` and ``epoch`` are counted from
    1, ``elapsed_s`` is in seconds of training, ``images_per_s`` is that of all workers. Metrics are there by their
    names, such as ``loss`` and ``accuracy``, and with None where a number is not finite.

    Raises UsageError if there is no such run, StorageError if it cannot be read.

    Example::

        rows = pandas.DataFrame(raytrain.history("first"))
        rows[rows.kind == "evaluation"].plot(x="step", y="accuracy")
    """
    return [row.to_json() for rows in read_rows(open_single_run(os.fspath(storage), name)) for row in rows]


def export_history(storage: str, name: str, output: str) -> int:
    """Write the history of a run into the file ``output``, .csv or .parquet; return the number of rows.

    The table has a column for each name that occurs in the history, and null where a row lacks the name.

    Raises UsageError if there is no such run, ``output`` has another suffix or no folder, or the history has over 1,000
    names; StorageError if it cannot be read or written.

    Example: ``export_history("s3://runs/photos", "first", "history.csv")``.
    """
    check_output(output, (".parquet", ".csv"))
    store = open_single_run(storage, name)

    # A first reading finds the columns: no row says which ones later rows have.
    num_rows, names = 0, dict[str, None]()
    for rows in read_rows(store):
        num_rows += len(rows)
        if isinstance(rows, StoredRows):
            columns = [column for column in rows.table.column_names if rows.table[column].null_count < len(rows)]
        else:
            columns = [column for row in rows for column in row.to_json()]
        names.update(dict.fromkeys(columns))
        if len(names) > _MAX_COLUMNS:
            raise UsageError(f"The history names {len(names):,} metrics; a table has at most {_MAX_COLUMNS:,} columns.")
    schema = pa.schema([(column, FIELDS.get(column, pa.float64())) for column in names])

    # A run that trains adds rows meanwhile; as many are written as were counted.
    num_left = num_rows
    with new_output(output) as file, table_writer(file, output, schema) as write:
        for rows in read_rows(store):
            write(_as_table(rows[:num_left], schema))
            num_left -= len(rows[:num_left])
    return num_rows


def _as_table(rows: Sequence[MetricRow], schema: pa.Schema) -> pa.Table:
    """Return rows of a history as a table with all columns of ``schema``, and nulls in those that they lack."""
    if isinstance(rows, StoredRows):
        return pa.concat_tables([schema.empty_table(), rows.table], promote_options="default").select(schema.names)
    # The same metric may be an integer in one row and have a fraction in the next, so each value becomes one of the
    # type of its column.
    documents = [row.to_json() for row in rows]
    columns = list[pa.Array]()
    for field in schema:
        values = [document.get(field.name) for document in documents]
        to_type = _PYTHON_TYPE[field.type]
        columns.append(pa.array([None if value is None else to_type(value) for value in values], field.type))
    return pa.table(columns, schema=schema)
