"""Where the blocks of cached data sets are, as the driver fills the cache and workers ask for them. Knows no Ray."""

from __future__ import annotations

import threading
from collections import defaultdict
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
        """The blocks of ``dataset`` from number ``first`` on; waits at most ``timeout_s`` seconds for one.

        Raises RaytrainError if a data set cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._blocks[dataset]) > first, timeout_s)
            if self._failure:
                raise RaytrainError(self._failure)
            return self._blocks[dataset][first:]
