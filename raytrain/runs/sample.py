"""A history of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

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
