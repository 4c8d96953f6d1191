"""Requests that fail in passing are repeated: after ever longer pauses, drawn at random so that a crowd spreads out, and counted."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
_IN_PASSING = re.compile(
    r"status code: (?:5\d\d|408|429)\b|<Code>RequestTimeout|HTTP error"  # busy or broken; nothing or nobody answers
    r"|response body|Content-Range"  # broken off half way
    r"|NoSuchUpload"  # all parts of an upload had arrived, and the answer had not
)


@dataclass(frozen=True)
class Patience:
    """How often a request is repeated at most, and for how long."""

    max_repeats: int
    within_s: float


PATIENT = Patience(100, 180.0)  # where half of the requests fail, ten in a row do once in a thousand; the time is what ends it
HASTY = Patience(2, 10.0)


class _Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self) -> None:
        with self._lock:
            self.value += 1


_repeats = _Counter()


def num_retries() -> int:
    """How many requests this process has repeated so far."""
    return _repeats.value


def repeat(operation: Callable[[], T], patience: Patience) -> T:
    """Carry out ``operation``, again and again where it fails in passing; raises what it raised last."""
    deadline = time.monotonic() + patience.within_s
    for attempt in count():
        try:
            return operation()
        except Exception as error:
            if not _IN_PASSING.search(str(error)) or attempt >= patience.max_repeats or time.monotonic() > deadline:
                raise
        _repeats.add()
        time.sleep(random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)))
    raise AssertionError
