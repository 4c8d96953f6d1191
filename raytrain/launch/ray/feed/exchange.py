"""Blocks between processes: where cached ones are, and bounded queues from the reader to the workers."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from raytrain.errors import RaytrainError


class BlockDirectory:
    """References of cached blocks, by data set and in order. Every method may be called from many threads at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[str, list[Any]] = defaultdict(list)
        self._failure: str | None = None

    def add(self, dataset: str, refs: list[Any]) -> None:
        """Add the next blocks of ``dataset``."""
        with self._changed:
            self._blocks[dataset] += refs
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Note that a data set cannot be read to its end."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def blocks(self, dataset: str, first: int, timeout_s: float) -> list[Any]:
        """Blocks of ``dataset`` from number ``first`` on; waits for one. RaytrainError if they can't be read."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._blocks[dataset]) > first, timeout_s)
            if self._failure:
                raise RaytrainError(self._failure)
            return self._blocks[dataset][first:]


@dataclass(frozen=True)
class Stream:
    """One pass over a data set by one worker group; the same on all of its workers."""

    group: int  # number of the worker group in the run, counted from 0
    number: int  # number of this group's passes over the data set, counted from 0
    dataset: str  # train or test
    first_step: int
    num_workers: int


class _Queue:
    """The blocks that wait for one worker, and how that worker hears of them: a block wakes nobody else."""

    def __init__(self, lock: threading.RLock) -> None:
        self.blocks: deque[Any] = deque()
        self.changed = threading.Condition(lock)


class StreamQueues:
    """The queues of a run's streams, one for each worker. Every method may be called from many threads at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # for those who feed the queues
        self._queues: dict[Stream, list[_Queue]] = {}
        self._failures: dict[Stream, str] = {}
        self._requested: deque[Stream] = deque()
        self._num_groups = 0
        self._closed = False

    def join_group(self) -> int:
        """The number of the worker group that starts now."""
        with self._changed:
            self._num_groups += 1
            return self._num_groups - 1

    def open(self, stream: Stream) -> None:
        """Open a stream. This closes older streams of the same data set, and those of earlier worker groups."""
        with self._changed:
            for other in list(self._queues):
                if other.dataset == stream.dataset or other.group < stream.group:
                    self._wake(self._queues.pop(other))
            self._queues[stream] = [_Queue(self._lock) for _ in range(stream.num_workers)]
            self._changed.notify_all()

    def requested(self, timeout_s: float) -> Stream | None:
        """A stream that a worker asked for and that is not being read yet; None after ``timeout_s``, or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._requested or self._closed, timeout_s)
            return self._requested.popleft() if self._requested else None

    def push(self, stream: Stream, rank: int, block: list[Any], depth: int) -> bool:
        """Queue a block for a worker, once fewer than ``depth`` wait for it; False if the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: stream not in self._queues or len(self._queues[stream][rank].blocks) < depth)
            if stream not in self._queues:
                return False
            self._queues[stream][rank].blocks += block
            self._queues[stream][rank].changed.notify_all()
            return True

    def take(self, stream: Stream, rank: int, timeout_s: float) -> list[Any]:
        """The blocks queued for a worker; [] after ``timeout_s``. Raises RuntimeError if another group has started."""
        with self._changed:
            if stream not in self._queues:
                self._request(stream)
            queue = self._queues[stream][rank]
            queue.changed.wait_for(lambda: self._has_news(stream, queue), timeout_s)
            if stream not in self._queues:
                raise RuntimeError("another worker group reads the data now")
            blocks = list(queue.blocks)
            if not blocks and stream in self._failures:
                raise RaytrainError(self._failures[stream])
            queue.blocks.clear()
            self._changed.notify_all()
            return blocks

    def fail(self, stream: Stream, reason: str) -> None:
        """Note that a stream ends early, after what is queued."""
        with self._changed:
            self._failures[stream] = reason
            self._wake(self._queues.get(stream, []))

    def close(self) -> None:
        """Close all streams."""
        with self._changed:
            self._closed = True
            for queues in self._queues.values():
                self._wake(queues)
            self._queues.clear()
            self._changed.notify_all()

    def _request(self, stream: Stream) -> None:
        if stream.group < self._num_groups - 1:
            raise RuntimeError("another worker group reads the data now")
        self.open(stream)
        self._requested.append(stream)

    def _has_news(self, stream: Stream, queue: _Queue) -> bool:
        return stream not in self._queues or bool(queue.blocks) or stream in self._failures

    def _wake(self, queues: list[_Queue]) -> None:
        for queue in queues:
            queue.changed.notify_all()
