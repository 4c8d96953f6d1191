"""Wait for what another thread or process does, if it offers no event to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 400.0


def wait_for(happened: Callable[[], T], otherwise: str = "it does not happen", deadline_s: float = DEADLINE_S) -> T:
    """Return what ``happened`` returns as soon as that is true; AssertionError with ``otherwise`` at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (result := happened()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)  # there is no event to wait for
    return result
