"""Fetches many objects at a time, with adaptive concurrency and hedged requests.

A bucket answers most requests within tens of milliseconds, and one in twenty or so within hundreds. How many requests
must be in flight so that a core has enough to decode depends on where the bucket is; so it is tried. A request that is
slow is hedged: it is sent a second time, and the answer that comes first counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

MAX_THREADS = 256  # most requests that one process has in flight at a time, over all of its stores

_FIRST_LIMIT, _LAST_LIMIT = 64, 128  # of one call; there is room for more calls, and for hedges
_WORTH_IT = 1.1  # times as fast must twice as many requests be
_TRY_EVERY = 64  # calls
_NUM_REMEMBERED, _LEARN_EVERY = 1024, 64  # requests: the slow ones of a call come together, at its end
_MIN_SLOW_S = 0.1  # on a busy machine many take longer than they should
_LOOK_EVERY_S = 0.05
_TOGETHER = 16  # results: to wake for each one would take a tenth of the time that small requests take
_HEDGED_FRACTION = 0.1  # of a call's requests at most: a bucket that is slow altogether gets few more

Content = bytes | Exception


class Concurrency:
    """Adaptive concurrency: the number of requests in flight is doubled whenever that turns out to be faster."""

    def __init__(self) -> None:
        self.limit = _FIRST_LIMIT
        self._rate_before: float | None = None  # with half as many, while twice as many are tried
        self._calls_left = 1
        self._connected = False
        self._lock = threading.Lock()

    def observe(self, limit: int, num: int, seconds: float) -> None:
        """Learn that ``num`` objects took a call so long, with ``limit`` requests in flight."""
        with self._lock:
            if limit != self.limit or num < limit:
                return
            if not self._connected:  # the first call with so many requests makes their connections
                self._connected = True
                return
            self._calls_left -= 1
            rate = num / seconds
            if self._rate_before is not None and rate < _WORTH_IT * self._rate_before:
                self._try(limit // 2, None)
            elif self._rate_before is not None or self._calls_left <= 0:
                more = 2 * limit <= min(num, _LAST_LIMIT)
                self._try(*((2 * limit, rate) if more else (limit, None)))

    def _try(self, limit: int, rate_before: float | None) -> None:
        self._connected = limit <= self.limit
        self.limit, self._rate_before, self._calls_left = limit, rate_before, _TRY_EVERY


class HedgeDelay:
    """When a request is hedged: once it has taken twice the 90th percentile of the last ones."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._num = 0
        self.after_s = float("inf")
        """Seconds after which a request is hedged; as long as nothing is known, none is."""

    def observe(self, seconds: float) -> None:
        """Learn how long a request took."""
        self._seconds.append(seconds)
        if self._num % _LEARN_EVERY == 0:
            in_order = sorted(self._seconds.copy())  # other threads append meanwhile
            self.after_s = max(_MIN_SLOW_S, 2 * in_order[len(in_order) * 9 // 10])
        self._num += 1


_concurrency, _hedge_delay = Concurrency(), HedgeDelay()


def fetch_each(get: Callable[[int], Content], num: int) -> Generator[tuple[int, Content]]:
    """Call ``get`` with 0 to ``num`` - 1 in threads, which release the GIL; yields number and result as they come."""
    fetch = _Fetch(get, num)
    limit, began = _concurrency.limit, time.monotonic()
    for _ in range(min(limit, num)):
        threads().submit(fetch.work)
    try:
        yield from fetch.results()
    finally:
        fetch.close()
    _concurrency.observe(limit, num, time.monotonic() - began)


class _Fetch:
    """One call: what threads have begun, and what has arrived."""

    def __init__(self, get: Callable[[int], Content], num: int) -> None:
        self._get = get
        self._remaining = iter(range(num))  # all threads share it: whichever is free takes the next number
        self._missing = set(range(num))
        self._begun: deque[tuple[int, float]] = deque()  # number and time, the earliest first
        self._arrived: deque[tuple[int, Content]] = deque()
        self._wake_at, self._enough = 1, threading.Event()
        self._hedges_left = int(num * _HEDGED_FRACTION) + 1

    def work(self) -> None:
        """Fetch, until nothing remains."""
        for number in self._remaining:
            began = time.monotonic()
            self._begun.append((number, began))
            content = self._get(number)
            _hedge_delay.observe(time.monotonic() - began)
            self._arrive(number, content)

    def results(self) -> Iterator[tuple[int, Content]]:
        """Each number once, with what came first for it."""
        while self._missing:
            slow_in_s = self._hedge_slow_requests()
            self._wake_at = min(_TOGETHER, len(self._missing))
            if len(self._arrived) < self._wake_at:
                self._enough.wait(slow_in_s)
            self._enough.clear()
            while self._arrived:
                number, content = self._arrived.popleft()
                if number in self._missing:
                    self._missing.remove(number)
                    yield number, content

    def close(self) -> None:
        """Send no more requests."""
        for _ in self._remaining:
            pass

    def _hedge_slow_requests(self) -> float | None:
        """Hedge slow requests; returns the seconds until the next one may be slow."""
        while self._hedges_left and self._begun:
            number, began = self._begun[0]
            left_s = began + _hedge_delay.after_s - time.monotonic()
            if number in self._missing and left_s > 0:
                return min(left_s, _LOOK_EVERY_S)
            self._begun.popleft()
            if number in self._missing:
                self._hedges_left -= 1
                threads().submit(self._hedge, number)
        return _LOOK_EVERY_S if self._hedges_left else None

    def _hedge(self, number: int) -> None:
        content = self._get(number)
        if isinstance(content, bytes):  # what failed the second time may yet come the first
            self._arrive(number, content)

    def _arrive(self, number: int, content: Content) -> None:
        self._arrived.append((number, content))
        if len(self._arrived) >= self._wake_at:
            self._enough.set()


def threads() -> ThreadPoolExecutor:
    """This process's thread pool for requests. Started once, because calls are many and short."""
    return _threads_of(os.getpid())


@cache
def _threads_of(process: int) -> ThreadPoolExecutor:
    """A pool for each process: one that is forked has the pool of its parent, but none of its threads."""
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="storage")
