"""What a loop does now and then: whether it is time again."""

from __future__ import annotations

import time


class Throttle:
    """Remembers when each thing was done last."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def due(self, what: str, every_s: float) -> bool:
        """Whether ``what`` is to be done: the first time, and whenever ``every_s`` have passed since it was said to be."""
        now = time.monotonic()
        if now - self._last.get(what, -every_s) < every_s:
            return False
        self._last[what] = now
        return True
