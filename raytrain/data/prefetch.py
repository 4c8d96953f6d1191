"""An iterator whose items are produced ahead of time by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """The items of ``items``, produced by a thread up to ``depth`` ahead, starting now.

    An exception is raised where its item would have come. The thread closes ``items`` (a generator's ``finally`` runs
    there) when they are exhausted or :meth:`close` was called.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
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
        self._thread.join(wait_s)

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._offer(item):
                    break
            getattr(self._items, "close", lambda: None)()  # generators have it
            self._offer(_End(StopIteration()))
        except BaseException as error:
            self._offer(_End(error))

    def _offer(self, item: T | _End) -> bool:
        """Put an item into the queue; False if nobody wants it any more."""
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False


@dataclass(frozen=True)
class _End:
    """Marks the end of the items."""

    error: BaseException
