"""A run's metrics and skipped images as JSON lines in storage, written beside the run without holding it up."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from raytrain.storage.base import Store

Row = dict[str, Any]

METRICS = "metrics.jsonl"
SKIPPED = "skipped.jsonl"

_RETRY_S = 2.0
_REWRITE_MIN_S = 2.0
_REWRITE_S_PER_BYTE = 1e-5  # an object store cannot append: rewriting takes at most 100 kB/s of the uplink, however long the history


class History:
    """Rows that reach storage as they come: a folder's file grows by lines, an object is rewritten whole, seldomer as it grows.

    Recording never waits for storage, nor fails with it: a thread writes, tries again after a failure (``error`` says which), and
    :meth:`close` writes what is left. An existing history is gone on with. Safe to use from several threads.
    """

    def __init__(self, store: Store) -> None:
        self.error: str | None = None
        self._metrics = _Lines(store, METRICS)
        self._skipped = _Lines(store, SKIPPED)
        self._skipped_keys = {row["key"] for row in self._skipped.rows}
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write_as_it_comes, name="history", daemon=True)
        self._writer.start()

    @property
    def rows(self) -> list[Row]:
        """The metrics so far, in the order of recording."""
        return self._metrics.rows

    @property
    def skipped_rows(self) -> list[Row]:
        """The skipped images so far, each once."""
        return self._skipped.rows

    def record(self, row: Row) -> None:
        """Add one row of metrics."""
        self._metrics.extend([row])
        self._changed.set()

    def skipped(self, entries: Iterable[Row]) -> list[Row]:
        """Add those images, rows of ``key`` and ``reason``, that are not there yet; give back these."""
        new = list({row["key"]: row for row in entries if row["key"] not in self._skipped_keys}.values())
        self._skipped_keys.update(row["key"] for row in new)
        self._skipped.extend(new)
        self._changed.set()
        return new

    def rewind(self, step: int) -> None:
        """Drop the metrics after ``step``: a run that goes on from that step's checkpoint records them again."""
        self._metrics.keep(lambda row: row["step"] <= step)
        self._changed.set()

    def flush(self) -> None:
        """Write what storage does not have yet; raises what storage raises."""
        self._metrics.write()
        self._skipped.write()
        self.error = None

    def close(self) -> None:
        """Write the rest and end the thread; raises what storage raises. May be called twice."""
        self._closed.set()
        self._changed.set()
        self._writer.join()
        self.flush()

    def _write_as_it_comes(self) -> None:
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            try:
                self.flush()
                pause_s = max(self._metrics.pause_s(), self._skipped.pause_s())
            except Exception as error:  # whatever storage raises: the rows are kept and written later
                self.error = str(error) or type(error).__name__
                self._changed.set()
                pause_s = _RETRY_S
            self._closed.wait(pause_s)


class _Lines:
    """One document of JSON lines: whole in memory, in storage as of the last write."""

    def __init__(self, store: Store, path: str) -> None:
        self.rows = read_lines(store, path)
        self._store = store
        self._path = path
        self._file = None if "://" in store.url else Path(store.url) / path
        self._num_written = len(self.rows)
        self._size_bytes = 0
        self._rewrite = True  # the file that is there may end in half a line, left by a killed process
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    def extend(self, rows: list[Row]) -> None:
        with self._lock:
            self.rows.extend(rows)

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        with self._lock:
            self.rows = [row for row in self.rows if wanted(row)]
            self._rewrite = True

    def write(self) -> None:
        with self._writing:
            rows, rewrite = self._unwritten()
            if not rows and not (rewrite and self._num_written):
                return
            try:
                self._put(rows) if rewrite else self._append(rows)
            except BaseException:
                self._rewrite = True  # how much of it arrived is not known
                raise

    def _unwritten(self) -> tuple[list[Row], bool]:
        with self._lock:
            rewrite = self._rewrite or (self._file is None and len(self.rows) > self._num_written)
            self._rewrite = False
            return self.rows[0 if rewrite else self._num_written :], rewrite

    def pause_s(self) -> float:
        """How long to leave storage alone after a write."""
        return 0.0 if self._file else max(_REWRITE_MIN_S, self._size_bytes * _REWRITE_S_PER_BYTE)

    def _put(self, rows: list[Row]) -> None:
        text = encode_lines(rows)
        self._store.put(self._path, text)
        self._num_written, self._size_bytes = len(rows), len(text)

    def _append(self, rows: list[Row]) -> None:
        assert self._file is not None
        with self._file.open("ab") as file:
            file.write(encode_lines(rows))
        self._num_written += len(rows)


def encode_lines(rows: Iterable[Row]) -> bytes:
    """JSON lines of ``rows``; a number that JSON has no word for (a loss that is not finite) becomes null."""
    return b"".join(json.dumps(plain(row), allow_nan=False).encode() + b"\n" for row in rows)


def read_lines(store: Store, path: str) -> list[Row]:
    """The rows of a document of JSON lines, none where there is no such document; a line cut short by a kill is left out."""
    try:
        lines = store.get(path).splitlines()
    except FileNotFoundError:
        return []
    rows: list[Row] = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def steps_per_epoch(rows: Iterable[Row]) -> int:
    """Steps of an epoch as the metrics tell it, at least 1: the least number that puts each row into the epoch that it names.

    Exact where a row stands at the end of an epoch, as evaluations do; too small while the first epoch goes on.
    """
    return max((math.ceil(row["step"] / row["epoch"]) for row in rows), default=1)


def plain(value: Any) -> Any:
    """``value``, of lists and dictionaries, with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
