"""Many rows of a history at once, and a history of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from pyarrow import json

from raytrain.runs.documents import parse_line, plain
from raytrain.runs.metric_row import Kind, MetricRow

T = TypeVar("T")

SAMPLE_SIZE = 2**15


class Sample(Generic[T]):
    """Rows that come one after the other: all of a short history; of a long one the newest, and every n-th before them.

    Args:
        kind: the kind of a row. Each kind is thinned by itself, so that none gets lost between the others.
        size: of the newest rows at least so many are kept, and of the older ones of each kind at most so many.
    """

    def __init__(self, kind: Callable[[T], Hashable], size: int = SAMPLE_SIZE) -> None:
        self.num_rows = 0
        """Of the history, also those that are left out."""
        self._kind = kind
        self._size = size
        self._num_older = 0
        self._older: dict[Hashable, _Thinned[T]] = {}
        self._newest: list[T] = []

    @property
    def rows(self) -> list[T]:
        """The rows that are kept, in their order."""
        older = sorted(row for thinned in self._older.values() for row in thinned.rows)
        return [*(row for _, row in older), *self._newest]

    def since(self, row: int) -> tuple[int, list[T]]:
        """What a reader lacks who has the first ``row`` rows: the rows, or, if not all of them are kept, :attr:`rows`.

        Returns the number of rows before them, too.
        """
        first = self.num_rows - len(self._newest)
        return (row, self._newest[row - first :]) if row >= first else (0, self.rows)

    def extend(self, rows: Iterable[T]) -> None:
        """Add rows."""
        before = len(self._newest)
        self._newest.extend(rows)
        self.num_rows += len(self._newest) - before
        if len(self._newest) > 2 * self._size:
            for row in self._newest[: -self._size]:
                self._older.setdefault(self._kind(row), _Thinned(self._size)).add(self._num_older, row)
                self._num_older += 1
            del self._newest[: -self._size]

    def follow(self, first_row: int, rows: Iterable[T]) -> None:
        """Add rows that :meth:`since` of another sample gave: if they are all of its rows, they replace these."""
        if first_row == 0:
            self.keep(lambda row: False)
        self.extend(rows)

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Drop the rows that are not wanted; the others count as the whole history."""
        self._newest = [row for row in self._newest if wanted(row)]
        for thinned in self._older.values():
            thinned.rows = [(number, row) for number, row in thinned.rows if wanted(row)]
        self.num_rows = len(self.rows)


class _Thinned(Generic[T]):
    """Every n-th of many rows, with their numbers: n doubles when they become too many."""

    def __init__(self, size: int) -> None:
        self.rows: list[tuple[int, T]] = []
        self._size = size
        self._every = 1
        self._num_added = 0

    def add(self, number: int, row: T) -> None:
        if self._num_added % self._every == 0:
            self.rows.append((number, row))
        self._num_added += 1
        if len(self.rows) > self._size:
            del self.rows[1::2]
            self._every *= 2


pc: Any = pyarrow.compute  # whose functions are made at import

_MANY = 1000
"""Lines from which on a table is worth its price."""
_NUM_LOOKED_AT = 100
_MAX_NAMES = 64
"""Most metrics of a table: a history of a stranger may name millions, each of which would become a column."""
FIELDS = {
    "kind": pa.string(),
    **dict.fromkeys(("step", "epoch", "samples_seen"), pa.int64()),
    **dict.fromkeys(("elapsed_s", "learning_rate", "images_per_s", "data_wait_fraction"), pa.float64()),
}
"""What each row has beside its metrics, which are of float64."""


class StoredRows(Sequence[MetricRow]):
    """Rows as a ``table``: one becomes a :class:`MetricRow` when somebody takes it."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @property
    def names(self) -> list[str]:
        """The metrics that some of the rows have."""
        table = self.table
        return [name for name in table.column_names if name not in FIELDS and table[name].null_count < len(self)]

    def values(self, name: str) -> NDArray[np.float64]:
        """A field or a metric of all rows, (len(self),); NaN if it is not known."""
        return self.table[name].cast("float64").to_numpy()

    def of_kind(self, kind: Kind) -> StoredRows:
        """The rows of one kind."""
        return StoredRows(self.table.filter(pc.equal(self.table["kind"], kind)))

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
    """Parses lines of a metrics history: a table if they are many, otherwise a list. Damaged lines are left out.

    A table has only metrics that occurred before. Lines with others, or damaged ones, are parsed one after the other,
    together with the lines of the same call.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __call__(self, lines: Sequence[bytes]) -> Sequence[MetricRow]:
        if len(lines) >= _MANY:
            self._learn(_parse_one_by_one(lines[:_NUM_LOOKED_AT]))
            if (rows := self._parse_together(lines)) is not None:
                return rows
        rows = _parse_one_by_one(lines)
        self._learn(rows)
        return rows

    def _learn(self, rows: Iterable[MetricRow]) -> None:
        for row in rows:
            for name in row.metrics:
                if len(self._names) < _MAX_NAMES:
                    self._names[name] = None

    def _parse_together(self, lines: Sequence[bytes]) -> StoredRows | None:
        """The lines as a table; None if one of them does not fit, or is damaged."""
        schema = pa.schema({**FIELDS, **dict.fromkeys(self._names, pa.float64())})
        options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
        with suppress(pa.ArrowInvalid):
            table = json.read_json(pa.BufferReader(b"\n".join(lines)), parse_options=options)
            if table.num_rows == len(lines) and _is_whole(table):
                return StoredRows(table)
        return None


def rows_of_kind(rows: Sequence[MetricRow], kind: Kind) -> Sequence[MetricRow]:
    """The rows of one kind."""
    return rows.of_kind(kind) if isinstance(rows, StoredRows) else [row for row in rows if row.kind == kind]


def _parse_one_by_one(lines: Iterable[bytes]) -> list[MetricRow]:
    return [row for line in lines if (row := parse_line(line, MetricRow.from_json)) is not None]


def _row(document: dict[str, Any]) -> MetricRow:
    return MetricRow.from_json({name: value for name, value in plain(document).items() if value is not None})


def _is_whole(table: pa.Table) -> bool:
    """Whether each row has what :meth:`MetricRow.from_json` asks for."""
    needed = table["kind"], table["step"], table["epoch"]
    if any(column.null_count for column in needed):
        return False
    kinds = pc.is_in(table["kind"], pa.array(["step", "evaluation"]))
    return pc.all(kinds).as_py() and pc.min(table["step"]).as_py() >= 0 and pc.min(table["epoch"]).as_py() >= 1
