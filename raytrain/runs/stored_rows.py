"""Rows of a stored history as a table, which Arrow reads much faster than one row after the other."""

# Arrow has no types.
# pyright: basic
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from pyarrow import json

from raytrain.runs.documents import METRICS, parse_lines, plain
from raytrain.runs.line_file import StoredLines
from raytrain.runs.metric_row import Kind, MetricRow
from raytrain.storage.store import Store

pc: Any = pyarrow.compute  # whose functions are made at import

_MANY = 1000  # from this number of lines on, a table is faster than a list
_NUM_SAMPLED = 100  # lines at the start of a block: others are expected to have no other metrics
MAX_PART = 2**15  # rows that are read at once
_MAX_NAMES = 64
"""Limit on the metrics of a table: a stranger's history may name millions, each of which would become a column."""
FIELDS = {
    "kind": pa.string(),
    **dict.fromkeys(("step", "epoch", "samples_seen"), pa.int64()),
    **dict.fromkeys(("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction"), pa.float64()),
}
"""Columns of each row beside its metrics, which are of float64."""


class StoredRows(Sequence[MetricRow]):
    """A sequence of rows in an Arrow ``table``; a row becomes a :class:`MetricRow` when it is accessed."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @property
    def names(self) -> list[str]:
        """The metrics that at least one row has."""
        table = self.table
        return [name for name in table.column_names if name not in FIELDS and table[name].null_count < len(self)]

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a field or a metric of all rows, float64 (len(self),); NaN where it is unknown."""
        return self.table[name].cast("float64").to_numpy()

    def __len__(self) -> int:
        return self.table.num_rows

    def __iter__(self) -> Iterator[MetricRow]:
        for batch in self.table.to_batches(max_chunksize=_MANY):
            yield from map(_row, batch.to_pylist())

    @overload
    def __getitem__(self, index: int) -> MetricRow: ...
    @overload
    def __getitem__(self, index: slice) -> StoredRows: ...
    def __getitem__(self, index: int | slice) -> MetricRow | StoredRows:
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return _row(self.table.slice(chosen, 1).to_pylist()[0])
        assert chosen.step == 1
        return StoredRows(self.table.slice(chosen.start, len(chosen)))


class RowParser:
    """Parses lines of a metrics history, many into a table, few into a list. Damaged lines are left out.

    It remembers the names of metrics from one call to the next, because a table needs them before it reads the lines.

    Example:
        >>> rows = RowParser()([b'{"kind": "step", "step": 1, "epoch": 1, "loss": 2.3}'])
        >>> rows[0].loss
        2.3
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}  # of the metrics seen so far, in their order

    def __call__(self, lines: Sequence[bytes]) -> Sequence[MetricRow]:
        if len(lines) >= _MANY:
            # Arrow must know the columns. It refuses all lines if one is damaged, or has another metric. Then they are
            # parsed one by one.
            self._remember_metrics(parse_lines(MetricRow.from_json, lines[:_NUM_SAMPLED]))
            schema = pa.schema({**FIELDS, **dict.fromkeys(self._names, pa.float64())})
            options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
            with suppress(pa.ArrowInvalid):
                table = json.read_json(pa.BufferReader(b"\n".join(lines)), parse_options=options)
                if table.num_rows == len(lines) and _is_whole(table):
                    return StoredRows(table)
        rows = parse_lines(MetricRow.from_json, lines)
        self._remember_metrics(rows)
        return rows

    def _remember_metrics(self, rows: Iterable[MetricRow]) -> None:
        """Remember the names of the metrics of ``rows``, which become columns of the next tables, up to a limit."""
        for row in rows:
            for name in row.metrics:
                if len(self._names) < _MAX_NAMES:
                    self._names[name] = None


def _is_whole(table: pa.Table) -> bool:
    """Return True if each row has the fields that :meth:`MetricRow.from_json` requires."""
    if any(table[name].null_count for name in ("kind", "step", "epoch")):
        return False
    kinds = pc.is_in(table["kind"], pa.array(get_args(Kind)))
    return pc.all(kinds).as_py() and pc.min(table["step"]).as_py() >= 0 and pc.min(table["epoch"]).as_py() >= 1


def read_rows(store: Store) -> Iterator[Sequence[MetricRow]]:
    """Yield the whole metrics history in parts of bounded size, without damaged lines; nothing if there is none."""
    parse = RowParser()
    for block in StoredLines(store, METRICS).blocks():
        lines = block.splitlines()
        for start in range(0, len(lines), MAX_PART):
            yield parse(lines[start : start + MAX_PART])


def rows_of_kind(rows: Sequence[MetricRow], kind: Kind) -> Sequence[MetricRow]:
    """Return the rows of one kind."""
    if isinstance(rows, StoredRows):
        return StoredRows(rows.table.filter(pc.equal(rows.table["kind"], kind)))
    return [row for row in rows if row.kind == kind]


def _row(document: dict[str, Any]) -> MetricRow:
    """Return the row that a table has as ``document``, in which a column that the row lacks is null."""
    return MetricRow.from_json({name: value for name, value in plain(document).items() if value is not None})
