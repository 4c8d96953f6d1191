"""Produce items in a thread, ahead of whoever takes them."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Yields ``items``, which a thread produces from now on, up to ``depth`` of them ahead of whoever takes them.

    An exception in the thread is raised where its item would have come. The thread closes ``items`` (a generator's
    ``finally`` runs there) when they are exhausted, when :meth:`close` was called, or when the process ends.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        _prefetches.add(self)
        self._items = items
        self._ready: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True, name="prefetch")
        self._thread.start()

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # so that every further call raises it too
            raise item.error
        return item

    def close(self, wait_s: float = 0.0) -> None:
        """Stop producing, and wait up to ``wait_s`` seconds for the thread; the item in production may take longer."""
        self._closed.set()
        # The thread itself may get here, and must not wait for itself: Python collects garbage in any thread, such as
        # an object that closes this when it is deleted.
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def _produce(self) -> None:
        """Put items into the queue until they are exhausted or this is closed; an exception counts as the end."""
        try:
            for item in self._items:
                if not self._offer(item):
                    break
            getattr(self._items, "close", lambda: None)()  # generators have this method, other iterators may not
            self._offer(_End(StopIteration()))
        except BaseException as error:
            self._offer(_End(error))

    def _offer(self, item: T | _End) -> bool:
        """Put an item into the queue once there is room; return False if this was closed before."""
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False


@dataclass(frozen=True)
class _End:
    """The last entry of a queue: the exception that ended its items, StopIteration if they were exhausted."""

    error: BaseException


_prefetches: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()
_ENDS_WITHIN_S = 5.0


@atexit.register
def _end_prefetches() -> None:
    """End the threads before the interpreter ends, because one that frees a tensor later would abort the process.

    If the memory of a tensor is an array of NumPy, torch's destructor takes the interpreter's lock to free it. Once the
    interpreter is ending, Python ends every thread that asks for the lock, by an exception of C++. A destructor must
    not raise one, so the process aborts.
    """
    # Ask all threads to end before waiting for the first one, so that they end at the same time.
    for wait_s in (0.0, _ENDS_WITHIN_S):
        for prefetch in list(_prefetches):
            prefetch.close(wait_s)
