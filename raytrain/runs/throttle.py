"""Things that a loop does only now and then."""

from __future__ import annotations

import time


class Throttle:
    """Remembers when each thing was done last."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def due(self, what: str, every_s: float) -> bool:
        """Whether to do ``what`` now: the first time, and whenever ``every_s`` seconds have passed since the last."""
        now = time.monotonic()
        if now - self._last.get(what, -every_s) < every_s:
            return False
        self._last[what] = now
        return True
