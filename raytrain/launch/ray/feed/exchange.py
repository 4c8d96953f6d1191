"""Blocks between processes: where cached ones are, and bounded queues of streamed ones."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
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

    @property
    def age(self) -> tuple[int, int]:
        """Higher than that of any earlier pass over the same data set."""
        return self.group, self.number


class _Queue:
    """The blocks that wait for one worker, and how that worker hears of them: a block wakes nobody else."""

    def __init__(self, lock: threading.RLock) -> None:
        self.blocks: deque[Any] = deque()
        self.changed = threading.Condition(lock)


class StreamQueues:
    """Bounded queues of blocks, one for each worker of a stream. Every method may be called from many threads at once.

    A stream ends the older ones of its data set, and those of earlier worker groups.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._taken = threading.Condition(self._lock)  # for those who fill the queues
        self._queues: dict[Stream, dict[int, _Queue]] = {}
        self._failures: dict[Stream, str] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self._closed = False

    def open(self, stream: Stream, ranks: Iterable[int]) -> bool:
        """Open a stream for these workers; False if it is open. Raises RuntimeError if a newer one has ended it."""
        with self._lock:
            if stream in self._queues:
                return False
            group = max((group for group, _ in self._newest.values()), default=0)
            if self._closed or stream.group < group or stream.age < self._newest.get(stream.dataset, stream.age):
                raise RuntimeError(_ENDED)
            for other in list(self._queues):
                if other.dataset == stream.dataset or other.group < stream.group:
                    self._wake(self._queues.pop(other))
            self._newest[stream.dataset] = stream.age
            self._queues[stream] = {rank: _Queue(self._lock) for rank in ranks}
            return True

    def push(self, stream: Stream, rank: int, block: Any, depth: int) -> bool:
        """Queue a block for a worker, once fewer than ``depth`` wait for it; False if the stream has ended."""
        with self._lock:
            self._taken.wait_for(lambda: stream not in self._queues or len(self._queues[stream][rank].blocks) < depth)
            if stream not in self._queues:
                return False
            self._queues[stream][rank].blocks.append(block)
            self._queues[stream][rank].changed.notify_all()
            return True

    def take(self, stream: Stream, rank: int, timeout_s: float) -> list[Any]:
        """The blocks queued for a worker; [] after ``timeout_s``. Raises RuntimeError if a newer stream has begun."""
        with self._lock:
            queue = self._queues.get(stream, {}).get(rank) or _Queue(self._lock)
            queue.changed.wait_for(lambda: self._has_news(stream, queue), timeout_s)
            if stream not in self._queues:
                raise RuntimeError(_ENDED)
            blocks = list(queue.blocks)
            if not blocks and stream in self._failures:
                raise RaytrainError(self._failures[stream])
            queue.blocks.clear()
            self._taken.notify_all()
            return blocks

    def fail(self, stream: Stream, reason: str) -> None:
        """Note that a stream ends early, after what is queued."""
        with self._lock:
            self._failures[stream] = reason
            self._wake(self._queues.get(stream, {}))

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            self._closed = True
            for queues in self._queues.values():
                self._wake(queues)
            self._queues.clear()

    def _has_news(self, stream: Stream, queue: _Queue) -> bool:
        return stream not in self._queues or bool(queue.blocks) or stream in self._failures

    def _wake(self, queues: dict[int, _Queue]) -> None:
        for queue in queues.values():
            queue.changed.notify_all()
        self._taken.notify_all()


_ENDED = "another worker group reads the data now"
