"""Requests: many at a time, sent again if they are slow (hedges) or fail (retries).

Concurrency: a bucket answers most requests within tens of milliseconds. How many must be in flight until a core has
enough to decode depends on how far away the bucket is, so the number is found by trial: 64 at first, then twice as
many, which stay if they are at least 1.1 times as fast.

Hedges: one answer in twenty or so takes hundreds of milliseconds, whatever the object. A request that has taken twice
the 90th percentile of the last ones is sent a second time, and the answer that comes first counts. At most a tenth of
the requests of a call and one more are hedged, so that a bucket that is slow altogether gets few more.

Retries: a busy cloud refuses requests, and connections break. Such a request is sent again after a random wait, of
which the longest doubles each time (exponential backoff with full jitter): many workers that were refused at the same
moment do not all return at the same moment.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import TypeVar

MAX_THREADS = 256  # most requests that one process has in flight at a time, over all of its stores

_FIRST_LIMIT, _LAST_LIMIT = 64, 128  # requests in flight of one call; there is room for more calls, and for hedges
_MIN_GAIN = 1.1  # speed-up from which on twice as many requests are kept
_TRY_EVERY = 64  # calls between two such trials
_NUM_REMEMBERED, _LEARN_EVERY = 1024, 64  # requests; many, because the slow ones of a call come together at its end
_MIN_HEDGE_DELAY_S = 0.1  # no shorter, because on a busy machine many requests are delayed
_POLL_HEDGES_EVERY_S = 0.05
_WAKE_AT = 16  # answers: waking for each one would take a tenth of the time of small requests
_HEDGED_FRACTION = 0.1  # of a call's requests at most, and one more

INITIAL_WAIT_S = 0.1
MAX_WAIT_S = 15.0
_POLL_EXIT_EVERY_S = 1.0
_random = random.SystemRandom()  # of its own: Python's generator is the loop's, which seeds it before each step

Content = bytes | Exception
T = TypeVar("T")


# Many requests at a time.


def fetch_each(
    get: Callable[[str, str], bytes], paths: Sequence[str], etags: Sequence[str] = ()
) -> Generator[tuple[int, Content]]:
    """Fetch many objects at a time by calling ``get(path, etag)`` in threads; without ``etags``, each is empty.

    Yield the index of each object in ``paths``, and its content or the exception that ``get`` raised, as they come.
    What ``get`` raises besides Exception, such as SystemExit, is raised here. A caller that breaks off has no further
    requests sent; it does not wait for those that are in flight::

        for index, content in fetch_each(store.get, ["cat/1.jpg", "dog/2.jpg"]):
            ...
    """
    # Start as many threads as requests may be in flight; each fetches one object after the other.
    fetch = _Fetch(get, list(zip(paths, etags or repeat(""), strict=bool(etags))))
    limit, began = _concurrency.limit, time.monotonic()
    for _ in range(min(limit, len(paths))):
        request_threads().submit(fetch.work)
    try:
        while fetch.missing:
            # Sleep until several answers have come, or until another request may have become slow.
            hedge_in_s = fetch.hedge_slow_requests()
            fetch.wake_at = min(_WAKE_AT, len(fetch.missing))
            if len(fetch.arrived) < fetch.wake_at:
                fetch.enough_arrived.wait(hedge_in_s)
            fetch.enough_arrived.clear()
            while fetch.arrived:
                index, content = fetch.arrived.popleft()
                if not isinstance(content, (bytes, Exception)):
                    raise content
                if index in fetch.missing:  # else it is the second answer to a hedged request
                    fetch.missing.remove(index)
                    yield index, content
    finally:
        # Leave no index to the threads, so that no more requests are sent for a caller that breaks off.
        for _ in fetch.remaining:
            pass
    _concurrency.observe(limit, len(paths), time.monotonic() - began)


class _Fetch:
    """One call of :func:`fetch_each`: which requests its threads have begun, and which answers have arrived."""

    def __init__(self, get: Callable[[str, str], bytes], requests: list[tuple[str, str]]) -> None:
        self._get = get
        self._requests = requests
        self.remaining = iter(range(len(requests)))  # shared by all threads: whichever is free takes the next index
        self.missing = set(range(len(requests)))
        self._begun: deque[tuple[int, float]] = deque()  # index and time, the earliest first
        self.arrived: deque[tuple[int, Content | BaseException]] = deque()
        self.wake_at, self.enough_arrived = 1, threading.Event()
        self._hedges_left = int(len(requests) * _HEDGED_FRACTION) + 1

    def work(self) -> None:
        """Fetch one object after the other, in a thread, until none remains."""
        for index in self.remaining:
            began = time.monotonic()
            self._begun.append((index, began))
            content: Content | BaseException
            try:
                content = self._get(*self._requests[index])
            except BaseException as error:  # also SystemExit: the caller waits for an answer to each request
                content = error
            _hedge_delay.observe(time.monotonic() - began)
            self._arrive(index, content)

    def hedge_slow_requests(self) -> float | None:
        """Send requests that have become slow a second time; return the seconds after which to call this again.

        By then, the next request may have become slow. None if no more requests of this call may be hedged.
        """
        while self._hedges_left and self._begun:
            index, began = self._begun[0]
            left_s = began + _hedge_delay.after_s - time.monotonic()
            if index in self.missing and left_s > 0:
                return min(left_s, _POLL_HEDGES_EVERY_S)
            self._begun.popleft()
            if index in self.missing:
                self._hedges_left -= 1
                request_threads().submit(self._hedge, index)
        return _POLL_HEDGES_EVERY_S if self._hedges_left else None

    def _hedge(self, index: int) -> None:
        """Send a request a second time, in a thread; an error of this one is ignored."""
        with suppress(Exception):  # the first request may yet succeed
            self._arrive(index, self._get(*self._requests[index]))

    def _arrive(self, index: int, content: Content | BaseException) -> None:
        """Hand over an answer to the caller of :func:`fetch_each`, and wake it if enough have come."""
        self.arrived.append((index, content))
        if len(self.arrived) >= self.wake_at:
            self.enough_arrived.set()


class Concurrency:
    """Adaptive concurrency: the number of requests in flight is doubled whenever that turns out to be faster."""

    def __init__(self) -> None:
        self.limit = _FIRST_LIMIT
        self._rate_before: float | None = None  # objects/s with half as many requests, while twice as many are tried
        self._calls_left = 1  # until twice as many are tried
        self._is_connected = False  # whether a call with this limit has opened its connections
        self._lock = threading.Lock()

    def observe(self, limit: int, num: int, seconds: float) -> None:
        """Learn that a call for ``num`` objects took ``seconds``, with ``limit`` requests in flight."""
        with self._lock:
            # Ignore calls of other threads that began with another limit, and small calls, which do not reach it.
            if limit != self.limit or num < limit:
                return
            # The first call with a new limit opens their connections, so its time says nothing.
            if not self._is_connected:
                self._is_connected = True
                return
            self._calls_left -= 1
            rate = num / seconds
            if self._rate_before is not None and rate < _MIN_GAIN * self._rate_before:
                self._set_limit(limit // 2, None)
            elif self._rate_before is not None or self._calls_left <= 0:
                # The trial was a success, or the next one is due: try twice as many, if such a call can use them.
                may_double = 2 * limit <= min(num, _LAST_LIMIT)
                next_limit, rate_to_beat = (2 * limit, rate) if may_double else (limit, None)
                self._set_limit(next_limit, rate_to_beat)

    def _set_limit(self, limit: int, rate_before: float | None) -> None:
        """Use ``limit`` requests from now on; ``rate_before`` is the rate to beat, if they are a trial."""
        self._is_connected = limit <= self.limit  # as many connections are open already
        self.limit, self._rate_before, self._calls_left = limit, rate_before, _TRY_EVERY


class HedgeDelay:
    """The time after which a request is hedged: twice the 90th percentile of the last requests."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._num = 0
        self.after_s = float("inf")
        """Seconds after which a request is hedged; as long as nothing is known, none is."""

    def observe(self, seconds: float) -> None:
        """Learn how many ``seconds`` a request took."""
        self._seconds.append(seconds)
        if self._num % _LEARN_EVERY == 0:
            in_order = sorted(self._seconds.copy())  # a copy, because other threads append meanwhile
            self.after_s = max(_MIN_HEDGE_DELAY_S, 2 * in_order[len(in_order) * 9 // 10])
        self._num += 1


_concurrency, _hedge_delay = Concurrency(), HedgeDelay()


# Retries.


@dataclass(frozen=True)
class RetryPolicy:
    """Limits on the retries of a request: their number, and the time within which they begin."""

    max_retries: int
    max_duration_s: float  # measured from the first try; no retry starts later


DEFAULT = RetryPolicy(100, 180.0)
"""Limited by its duration in practice: if half of all requests fail, one in a thousand needs ten retries."""
FAIL_FAST = RetryPolicy(2, 10.0)

_retried: deque[None] = deque()  # an entry for each retry since they were counted last, by any thread


def with_retries(operation: Callable[[], T], policy: RetryPolicy, is_transient: Callable[[Exception], bool]) -> T:
    """Call ``operation``, and again after transient errors; raise the last error if ``policy`` allows no more.

    ``is_transient`` says whether an error may be gone at the next try. If the process is about to end, the error is
    raised, too. obstore's own retries can neither be counted, nor differ between calls, nor be broken off at that time.
    """
    give_up_at = time.monotonic() + policy.max_duration_s
    for number in range(policy.max_retries):
        try:
            return operation()
        except Exception as error:
            if not is_transient(error) or time.monotonic() >= give_up_at:
                raise
            _retried.append(None)
            if not sleep_unless_exiting(_random.uniform(0.0, min(MAX_WAIT_S, INITIAL_WAIT_S * 2**number))):
                raise
    return operation()


def sleep_unless_exiting(seconds: float) -> bool:
    """Sleep for ``seconds``; return False early if the process is about to end, which would wait for this thread."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, _POLL_EXIT_EVERY_S))
        # Once the interpreter is ending, a pool of threads takes no more calls. No other public call reveals that. What
        # is submitted here does nothing.
        try:
            _pool(os.getpid(), 1).submit(int)
        except RuntimeError:
            return False
    return True


def take_num_retries() -> int:
    """Return how many requests this process has retried since the last call."""
    num_retries = 0
    with suppress(IndexError):
        while True:
            _retried.popleft()
            num_retries += 1
    return num_retries


# Threads.


def request_threads() -> ThreadPoolExecutor:
    """Return this process's thread pool for requests. It is started once, because calls are many and short."""
    return _pool(os.getpid(), MAX_THREADS)


@cache
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads. It is cached by ``process``: a forked process must not use the pool of its parent."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="storage")
