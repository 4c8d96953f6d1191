"""Many requests at a time: how many, what happens to slow ones, and to those that nobody needs any more."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from raytrain.storage import retries_and_hedges
from raytrain.storage.retries_and_hedges import Concurrency, HedgeDelay, fetch_each

NUM = 200
PATHS = [str(number) for number in range(NUM)]


@pytest.fixture(autouse=True)
def _no_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a process has learnt of its storage is kept to its end; these tests count on none of it.
    monkeypatch.setattr(retries_and_hedges, "_concurrency", Concurrency())
    monkeypatch.setattr(retries_and_hedges, "_hedge_delay", HedgeDelay())


class Requests:
    """Answers at once, except the first time for ``slow`` numbers: these wait until ``enough`` others were repeated."""

    def __init__(self, slow: set[int], enough: int) -> None:
        self._slow, self._enough = slow, enough
        self._lock, self.released = threading.Lock(), threading.Event()
        self.counts: Counter[int] = Counter()

    def get(self, path: str, etag: str) -> bytes:
        number = int(path)
        with self._lock:
            self.counts[number] += 1
            first, num_repeated = self.counts[number] == 1, sum(count > 1 for count in self.counts.values())
            if num_repeated >= self._enough:
                self.released.set()
        if first and number in self._slow:
            self.released.wait()
            return b"late"
        return path.encode() if first else self.repeated(path)

    def repeated(self, path: str) -> bytes:
        return path.encode()


def test_a_slow_request_is_sent_again_and_the_first_answer_counts() -> None:
    requests = Requests({150}, enough=2)  # the first request for 150 is never answered
    assert dict(fetch_each(requests.get, PATHS)) == {number: str(number).encode() for number in range(NUM)}
    assert requests.counts[150] == 2
    requests.released.set()


def test_of_many_slow_requests_a_tenth_is_sent_again() -> None:
    slow = set(range(100, 140))
    requests = Requests(slow, enough=NUM // 10 + 1)
    fetched = dict(fetch_each(requests.get, PATHS))
    assert sum(requests.counts.values()) == NUM + NUM // 10 + 1
    assert all(fetched[number] in (b"late", str(number).encode()) for number in range(NUM))


def test_a_second_request_that_fails_does_not_end_the_first() -> None:
    class Failing(Requests):
        def repeated(self, path: str) -> bytes:
            raise OSError("the second request fails")

    assert dict(fetch_each(Failing({150}, enough=1).get, PATHS))[150] == b"late"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, type("PanicException", (BaseException,), {})])
def test_what_is_no_exception_reaches_the_caller_who_would_wait_for_ever(kind: type[BaseException]) -> None:
    def get(path: str, etag: str) -> bytes:
        if path == "150":
            raise kind("it ends the thread")
        return path.encode()

    with pytest.raises(kind, match="it ends the thread"):
        dict(fetch_each(get, PATHS))


def test_who_needs_no_more_gets_no_more() -> None:
    counts: Counter[str] = Counter()
    closed = threading.Event()
    limit = Concurrency().limit

    def get(path: str, etag: str) -> bytes:
        counts[path] += 1
        if path != "0":
            assert closed.wait(60)
        return b""

    fetched = fetch_each(get, [str(number) for number in range(10_000)])
    assert next(fetched) == (0, b"")
    fetched.close()
    num_begun = sum(counts.values())
    closed.set()
    assert num_begun <= limit + 1
    assert sum(counts.values()) <= num_begun + limit


def test_each_object_is_fetched_with_its_etag_and_an_error_takes_its_place() -> None:
    def get(path: str, etag: str) -> bytes:
        if path == "b":
            raise FileNotFoundError(path)
        return etag.encode()

    fetched = dict(fetch_each(get, ["a", "b", "c"], ["one", "two", "three"]))
    assert (fetched[0], fetched[2]) == (b"one", b"three")
    assert isinstance(fetched[1], FileNotFoundError)


def observe(concurrency: Concurrency, *limits_and_rates: tuple[int, float]) -> int:
    for limit, rate in limits_and_rates:
        concurrency.observe(limit, 512, 512 / rate)
    return concurrency.limit


@pytest.mark.parametrize(("rate_of_128", "limit"), [(1999.0, 128), (1050.0, 64)])
def test_twice_as_many_requests_stay_if_they_are_faster(rate_of_128: float, limit: int) -> None:
    concurrency = Concurrency()
    assert observe(concurrency, (64, 10), (64, 1000)) == 128, "the first call makes connections"
    assert observe(concurrency, (64, 1000)) == 128, "a call of another thread, which began before"
    assert observe(concurrency, (128, 10), (128, rate_of_128)) == limit
    assert observe(concurrency, *[(limit, 1000)] * 63) == limit


def test_more_requests_are_tried_again_after_a_while() -> None:
    slower = [(64, 1000), (64, 1000), (128, 1000), (128, 1000)]
    assert observe(Concurrency(), *slower, *[(64, 1000)] * 63) == 64
    assert observe(Concurrency(), *slower, *[(64, 1000)] * 64) == 128


def test_a_small_call_says_nothing_about_more_requests() -> None:
    concurrency = Concurrency()
    concurrency.observe(64, 60, 0.1)
    concurrency.observe(64, 100, 0.1)
    assert concurrency.limit == 64


@pytest.mark.parametrize("first_s", [0.4, 0.001])
def test_a_request_is_slow_at_twice_what_most_take_however_long_a_few_take(first_s: float) -> None:
    slowness = HedgeDelay()
    assert slowness.after_s == float("inf")
    slowness.observe(first_s)
    draw = random.Random(0)
    for _ in range(1000):
        slowness.observe(60.0 if draw.random() < 0.05 else draw.uniform(0.05, 0.1))
    assert 0.15 < slowness.after_s < 0.3
