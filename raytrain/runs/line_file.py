"""A document of JSON lines that grows: one file in a folder; in a bucket, where no object grows, objects of 8 MiB.

The second object of ``metrics.jsonl`` is called ``metrics.jsonl.000001``, and so on: one after the other they are the
document. Only the last one is written again when lines are added, and it is written less often the larger it is.

A run that resumes from a checkpoint cuts off the rows after its step, and records them again. The cut, too, is made by
whoever writes: until then it waits in memory, as new rows do.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from raytrain.runs.documents import encode_lines, parse_line
from raytrain.storage.folder import FolderStore
from raytrain.storage.store import Store

T = TypeVar("T")

BLOCK_BYTES = 2**24  # most that is read of a document at once
OBJECT_BYTES = 2**23
REWRITE_MIN_S = 2.0
_REWRITE_S_PER_BYTE = 1e-5  # rewriting the last object takes at most 100 kB/s of the uplink


def object_path(path: str, number: int) -> str:
    """Return the path of an object of the document ``path``, by its number, counted from 0."""
    return f"{path}.{number:06d}" if number else path


class StoredLines:
    """The document ``path`` of ``store``, read as if it were one file."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self.starts = [0]
        """First byte of each of its objects, as far as it has been read."""

    def get_range(self, start: int, num_bytes: int) -> bytes:
        """Return at most ``num_bytes`` of the document, from byte ``start`` on.

        ``start`` is in an object that was read before, or right after it. Raises FileNotFoundError and StorageError.
        """
        data, number = b"", bisect_right(self.starts, start) - 1
        while True:
            # Asked before the object is read: nothing is added to it once there is a next one.
            ended = self._store.exists(object_path(self._path, number + 1))
            offset = start + len(data) - self.starts[number]
            data += self._store.get_range(object_path(self._path, number), offset, num_bytes - len(data))
            if not ended or len(data) == num_bytes:
                return data
            number += 1
            if number == len(self.starts):
                self.starts.append(start + len(data))

    def blocks(self) -> Iterator[bytes]:
        """Yield the document in blocks of whole lines; a last line that was not finished is a block of its own."""
        start = 0
        while True:
            try:
                data = self.get_range(start, BLOCK_BYTES)
            except FileNotFoundError:
                return
            # Up to the last whole line; the rest is read again with the next block.
            block = data[: data.rfind(b"\n") + 1] or data
            if not block:
                return
            yield block
            start += len(block)


class LineFile(Generic[T]):
    """Add rows to a document and cut it, from any thread. New rows and cuts wait in memory for :meth:`write`.

    Example:
        >>> metrics = LineFile(store, "metrics.jsonl", MetricRow.from_json, MetricRow.to_json)
        >>> metrics.cut(lambda row: row.step <= 120)
        >>> metrics.extend(rows)
        >>> metrics.write()
    """

    def __init__(
        self, store: Store, path: str, parse: Callable[[dict[str, Any]], T], to_json: Callable[[T], dict[str, Any]]
    ) -> None:
        self._store = store
        self._path = path
        self._parse = parse
        self._to_json = to_json
        self._folder = store if isinstance(store, FolderStore) else None  # where a file grows
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: list[T] = []
        self._cuts: list[Callable[[T], bool]] = [lambda row: True]  # a killed process may have left half a line
        self._size_bytes = 0  # of the file, as far as it is whole
        self._torn = False  # the file may have more: a part of a write that failed
        self._number = 0  # of the last object
        self._object = b""  # its content

    def extend(self, rows: Iterable[T]) -> None:
        """Add rows."""
        with self._lock:
            self._waiting.extend(rows)

    def cut(self, wanted: Callable[[T], bool]) -> None:
        """Drop the first row that is not wanted, and all rows after it."""
        with self._lock:
            self._waiting = [row for row in self._waiting if wanted(row)]
            self._cuts.append(wanted)

    def write(self) -> None:
        """Cut the document and write the rows that wait; raise StorageError if that fails."""
        with self._writing:
            while cuts := self._cuts.copy():
                self._cut_document(lambda row: all(wanted(row) for wanted in cuts))
                del self._cuts[: len(cuts)]
            with self._lock:
                if self._cuts:  # a new one: the rows that wait belong behind it
                    return
                rows, self._waiting = self._waiting, []
            try:
                if rows:
                    self._append(encode_lines(self._to_json(row) for row in rows))
            except BaseException:
                # The rows wait again, but for those that were cut meanwhile.
                with self._lock:
                    kept = [row for row in rows if all(wanted(row) for wanted in self._cuts)]
                    self._waiting = [*kept, *self._waiting]
                raise

    def pause_s(self) -> float:
        """Return how long to leave storage alone after a write, in seconds."""
        return 0.0 if self._folder else max(REWRITE_MIN_S, len(self._object) * _REWRITE_S_PER_BYTE)

    def _append(self, data: bytes) -> None:
        """Add whole lines to the end of the document."""
        # An object is written again as a whole, and a file grows.
        if self._folder is None:
            self._store.put(object_path(self._path, self._number), self._object + data)
            self._set_object(self._number, self._object + data)
            return
        if self._torn:
            self._folder.truncate(self._path, self._size_bytes)

        # A write that fails may leave any part of its bytes: the next one cuts the file to what was whole.
        self._torn = True
        write = self._folder.append if self._size_bytes else self._store.put  # which creates the folder, too
        write(self._path, data)
        self._size_bytes += len(data)
        self._torn = False

    def _cut_document(self, wanted: Callable[[T], bool]) -> None:
        """Cut the document before the first row that is not wanted, or a line that has no end."""
        lines = StoredLines(self._store, self._path)
        end = self._end_of_wanted(lines, wanted)
        if self._folder is not None:
            self._folder.truncate(self._path, end)
            self._size_bytes, self._torn = end, False
            return

        # Keep the objects up to the one that the end is in, and the beginning of that one. The last object is deleted
        # first: without it, the others are still a document.
        number = max(0, bisect_left(lines.starts, end) - 1)
        num_bytes = end - lines.starts[number]
        last = number
        while self._store.exists(object_path(self._path, last + 1)):
            last += 1
        for beyond in range(last, number, -1):
            self._store.delete(object_path(self._path, beyond))
        content = b""
        with suppress(FileNotFoundError):
            content = self._store.get(object_path(self._path, number))
        if len(content) > num_bytes:
            self._store.put(object_path(self._path, number), content[:num_bytes])
        self._set_object(number, content[:num_bytes])

    def _end_of_wanted(self, lines: StoredLines, wanted: Callable[[T], bool]) -> int:
        """Return how many bytes the document has before the first row that is not wanted, or a line without an end."""
        end = 0
        for block in lines.blocks():
            if not block.endswith(b"\n"):
                break
            # Steps do not decrease: if the last row of a block is wanted, so are those before it.
            rows = (parse_line(line, self._parse) for line in reversed(block.splitlines()))
            last = next((row for row in rows if row is not None), None)
            if last is None or wanted(last):
                end += len(block)
                continue
            for line in block.splitlines(keepends=True):
                row = parse_line(line, self._parse)
                if row is not None and not wanted(row):
                    return end
                end += len(line)
        return end

    def _set_object(self, number: int, data: bytes) -> None:
        """Take ``data`` as the content of the last object, or begin the next one if it is full."""
        full = len(data) >= OBJECT_BYTES
        self._number, self._object = (number + 1, b"") if full else (number, data)
