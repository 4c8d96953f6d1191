"""A growing document of JSON lines, which is one file in a folder, and in a bucket several objects of 8 MiB.

The second object of ``metrics.jsonl`` is called ``metrics.jsonl.000001``, and so on; all objects in this order are the
document. When lines are added, only the last object is written again, and the larger it is, the less often. A run that
was copied from a bucket into a folder has several files, of which the last one grows.

A run that resumes from a checkpoint cuts off the rows after its step, and records them again. Like new rows, a cut
waits in memory until the thread that writes carries it out.
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

BLOCK_BYTES = 2**24  # limit for one piece of a document that is read
OBJECT_BYTES = 2**23  # from this size on, an object is full, and the next one begins
REWRITE_MIN_S = 2.0  # seconds between two writes of the last object, at least
_REWRITE_S_PER_BYTE = 1e-5  # so that rewriting the last object takes at most 100 kB/s of the uplink


def object_path(path: str, number: int) -> str:
    """Return the path of an object of the document ``path``, by its number, counted from 0."""
    return f"{path}.{number:06d}" if number else path


class StoredLines:
    """The document ``path`` of ``store``, read as if it were one file."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self.starts = [0]
        """Position in the document at which each object begins, as far as it has been read."""

    def get_range(self, start: int, num_bytes: int) -> bytes:
        """Return at most ``num_bytes`` of the document, from byte ``start`` on.

        Fewer are returned if the document ends before. ``start`` must be in an object that was read before, or right
        after it. Raises FileNotFoundError if there is no document, and StorageError if storage is out of reach.
        """
        data, number = b"", bisect_right(self.starts, start) - 1
        while True:
            # Ask for the next object before reading this one, to which nothing is added once there is a next.
            has_next = self._store.exists(object_path(self._path, number + 1))
            offset = start + len(data) - self.starts[number]
            data += self._store.get_range(object_path(self._path, number), offset, num_bytes - len(data))
            if not has_next or len(data) == num_bytes:
                return data
            number += 1
            if number == len(self.starts):
                self.starts.append(start + len(data))

    def blocks(self) -> Iterator[bytes]:
        """Yield the document in blocks of whole lines; an unfinished last line is a block of its own.

        Nothing is yielded if there is no document. A line that is longer than a block is no row: its first block is the
        last one, as the line may be a hole of terabytes.
        """
        start = 0
        while True:
            try:
                data = self.get_range(start, BLOCK_BYTES)
            except FileNotFoundError:
                return
            # Stop after the last whole line; the rest is read again with the next block.
            block = data[: data.rfind(b"\n") + 1] or data
            if not block:
                return
            yield block
            if len(data) == BLOCK_BYTES and b"\n" not in data:
                return
            start += len(block)


class LineFile(Generic[T]):
    """Adds rows to a document and cuts it. Calls may come from any thread; rows and cuts wait for :meth:`write`.

    ``to_json`` makes a line of a row, and ``parse`` a row of a line; see :func:`parse_line`. Rows that are there
    already are continued.

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
        self._lock = threading.Lock()  # of the rows and cuts that wait
        self._writing = threading.Lock()  # of the document
        self._waiting: list[T] = []
        # Cuts that wait. The first one keeps all rows: it removes half a line that a killed process may have left.
        self._cuts: list[Callable[[T], bool]] = [lambda row: True]
        self._size_bytes = 0  # of the last file, without the rest of a failed write
        self._torn = False  # the file may have the rest of a failed write at its end
        self._number = 0  # of the last object or file
        self._object = b""  # the content of the last object

    def extend(self, rows: Iterable[T]) -> None:
        """Add rows; :meth:`write` writes them."""
        with self._lock:
            self._waiting.extend(rows)

    def cut(self, is_kept: Callable[[T], bool]) -> None:
        """Drop the first row for which ``is_kept`` is False, and all rows after it; :meth:`write` cuts the document.

        Rows must be ordered so that no kept row comes after a dropped one.
        """
        with self._lock:
            self._waiting = [row for row in self._waiting if is_kept(row)]
            self._cuts.append(is_kept)

    def write(self) -> None:
        """Cut the document and write the rows that wait; raise StorageError if that fails.

        After a failure, the rows and the cuts still wait, for the next call.
        """
        with self._writing:
            while cuts := self._cuts.copy():
                self._cut_document(lambda row: all(is_kept(row) for is_kept in cuts))
                del self._cuts[: len(cuts)]
            with self._lock:
                if self._cuts:  # a new cut, after which the waiting rows belong
                    return
                rows, self._waiting = self._waiting, []
            try:
                if rows:
                    self._append(encode_lines(self._to_json(row) for row in rows))
            except BaseException:
                # Put the rows back, except those that were cut meanwhile.
                with self._lock:
                    kept = [row for row in rows if all(is_kept(row) for is_kept in self._cuts)]
                    self._waiting = [*kept, *self._waiting]
                raise

    def pause_s(self) -> float:
        """Return how long to leave storage alone after a write, in seconds."""
        return 0.0 if self._folder else max(REWRITE_MIN_S, len(self._object) * _REWRITE_S_PER_BYTE)

    def _append(self, data: bytes) -> None:
        """Add whole lines to the end of the document."""
        # An object must be written again as a whole; a file grows.
        if self._folder is None:
            self._store.put(object_path(self._path, self._number), self._object + data)
            self._set_object(self._number, self._object + data)
            return
        # If a write fails, a part of its bytes may be in the file. Then the next write cuts them off first.
        path = object_path(self._path, self._number)
        if self._torn:
            self._folder.truncate(path, self._size_bytes)
        self._torn = True
        write = self._folder.append if self._size_bytes else self._store.put  # which creates the folder, too
        write(path, data)
        self._size_bytes += len(data)
        self._torn = False

    def _cut_document(self, is_kept: Callable[[T], bool]) -> None:
        """Cut the document before its first row that is not kept, or before an unfinished line."""
        lines = StoredLines(self._store, self._path)
        end = self._end_of_kept(lines, is_kept)

        # Keep the objects before the new end, and the beginning of the one that it is in. Delete the last object first:
        # whenever this breaks off, the remaining objects are a document.
        number = max(0, bisect_left(lines.starts, end) - 1)
        num_bytes = end - lines.starts[number]
        last = number
        while self._store.exists(object_path(self._path, last + 1)):
            last += 1
        for beyond in range(last, number, -1):
            self._store.delete(object_path(self._path, beyond))
        if self._folder is not None:
            self._folder.truncate(object_path(self._path, number), num_bytes)
            self._number, self._size_bytes, self._torn = number, num_bytes, False
            return
        content = b""
        with suppress(FileNotFoundError):
            content = self._store.get(object_path(self._path, number))
        if len(content) > num_bytes:
            self._store.put(object_path(self._path, number), content[:num_bytes])
        self._set_object(number, content[:num_bytes])

    def _end_of_kept(self, lines: StoredLines, is_kept: Callable[[T], bool]) -> int:
        """Return the number of bytes before the first row that is not kept, or before an unfinished line.

        All objects up to that position are in ``lines.starts`` afterwards.
        """
        end = 0
        for block in lines.blocks():
            if not block.endswith(b"\n"):
                break
            # Steps never decrease: if the last row of a block is kept, all before it are. So of most blocks only the
            # last undamaged line is parsed.
            rows = (parse_line(line, self._parse) for line in reversed(block.splitlines()))
            last = next((row for row in rows if row is not None), None)
            if last is None or is_kept(last):
                end += len(block)
                continue
            for line in block.splitlines(keepends=True):
                row = parse_line(line, self._parse)
                if row is not None and not is_kept(row):
                    return end
                end += len(line)
        return end

    def _set_object(self, number: int, data: bytes) -> None:
        """Note that the last object has this ``number`` and the content ``data``; if it is full, begin the next one."""
        is_full = len(data) >= OBJECT_BYTES
        self._number, self._object = (number + 1, b"") if is_full else (number, data)
