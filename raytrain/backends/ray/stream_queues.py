"""Blocks on their way from the driver, which reads them, to the workers, which use them up: bounded queues. Knows no Ray."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from raytrain.errors import RaytrainError

FEED, WAIT = "feed", "wait"
"""Names for the calls that wait: of who fills the queues, and of the workers."""


@dataclass(frozen=True)
class Stream:
    """One reading of a data set by one worker group; the same on all of its workers."""

    group: int  # the run's worker groups, counted from 0
    number: int  # readings of that data set by that group, counted from 0
    name: str  # train, or test
    first_step: int
    num_workers: int


class StreamQueues:
    """The queues of a run's streams, one for each worker. Every method may be called from many threads at once."""

    def __init__(self) -> None:
        self._stream_changed = threading.Condition()
        self._queues: dict[Stream, list[deque[Any]]] = {}
        self._stream_failures: dict[Stream, str] = {}
        self._wanted: deque[Stream] = deque()
        self._num_groups = 0
        self._streams_closed = False

    def join_group(self) -> int:
        """The number of the worker group that begins now."""
        with self._stream_changed:
            self._num_groups += 1
            return self._num_groups - 1

    def open_stream(self, stream: Stream) -> None:
        """Begin a stream. One of the same data set ends, for nobody reads it any more, and those of groups before."""
        with self._stream_changed:
            for other in [other for other in self._queues if other.name == stream.name or other.group < stream.group]:
                del self._queues[other]
            self._queues[stream] = [deque() for _ in range(stream.num_workers)]
            self._stream_changed.notify_all()

    def wanted(self, timeout_s: float) -> Stream | None:
        """A stream that a worker asked for and nobody foresaw; None where there is none within ``timeout_s``, or streams are closed."""
        with self._stream_changed:
            self._stream_changed.wait_for(lambda: self._wanted or self._streams_closed, timeout_s)
            return self._wanted.popleft() if self._wanted else None

    def push(self, stream: Stream, rank: int, block: list[Any], depth: int) -> bool:
        """Queue one block for a worker, once fewer than ``depth`` are waiting for it; False where the stream has ended."""
        with self._stream_changed:
            self._stream_changed.wait_for(lambda: stream not in self._queues or len(self._queues[stream][rank]) < depth)
            if stream not in self._queues:
                return False
            self._queues[stream][rank] += block
            self._stream_changed.notify_all()
            return True

    def take(self, stream: Stream, rank: int, timeout_s: float) -> list[Any]:
        """The blocks that wait for a worker, in order; none where none came within ``timeout_s``.

        Raises RaytrainError where the data cannot be read, RuntimeError where another worker group has begun.
        """
        with self._stream_changed:
            if stream not in self._queues:
                self._ask_for(stream)
            self._stream_changed.wait_for(lambda: self._has_news(stream, rank), timeout_s)
            if stream not in self._queues:
                raise RuntimeError("another worker group reads the data now")
            blocks = list(self._queues[stream][rank])
            if not blocks and stream in self._stream_failures:
                raise RaytrainError(self._stream_failures[stream])
            self._queues[stream][rank].clear()
            self._stream_changed.notify_all()
            return blocks

    def fail_stream(self, stream: Stream, reason: str) -> None:
        """Note that a stream breaks off after what was queued."""
        with self._stream_changed:
            self._stream_failures[stream] = reason
            self._stream_changed.notify_all()

    def close_streams(self) -> None:
        """End all streams."""
        with self._stream_changed:
            self._streams_closed = True
            self._queues.clear()
            self._stream_changed.notify_all()

    def _ask_for(self, stream: Stream) -> None:
        if stream.group < self._num_groups - 1:
            raise RuntimeError("another worker group reads the data now")
        self.open_stream(stream)
        self._wanted.append(stream)

    def _has_news(self, stream: Stream, rank: int) -> bool:
        return stream not in self._queues or bool(self._queues[stream][rank]) or stream in self._stream_failures
