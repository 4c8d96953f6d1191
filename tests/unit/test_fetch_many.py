"""Many requests at a time: how many, what happens to slow ones, and to those that nobody needs any more."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from raytrain.storage import hedged_requests as fetch_many
from raytrain.storage.hedged_requests import Concurrency, HedgeDelay, fetch_each

NUM = 200


@pytest.fixture(autouse=True)
def _no_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_many, "_concurrency", Concurrency())
    monkeypatch.setattr(fetch_many, "_hedge_delay", HedgeDelay())


class Requests:
    """Answers at once, except the first time for ``slow`` numbers: these wait until ``enough`` others were repeated."""

    def __init__(self, slow: set[int], enough: int) -> None:
        self._slow, self._enough = slow, enough
        self._lock, self._released = threading.Lock(), threading.Event()
        self.counts: Counter[int] = Counter()

    def get(self, number: int) -> bytes | Exception:
        with self._lock:
            self.counts[number] += 1
            first, num_repeated = self.counts[number] == 1, sum(count > 1 for count in self.counts.values())
            if num_repeated >= self._enough:
                self._released.set()
        if first and number in self._slow:
            self._released.wait()
            return b"late"
        return self.repeated(number) if not first else str(number).encode()

    def repeated(self, number: int) -> bytes | Exception:
        return str(number).encode()


def test_a_slow_request_is_sent_again_and_the_first_answer_counts() -> None:
    requests = Requests({150}, enough=2)  # the first request for 150 is never answered
    assert dict(fetch_each(requests.get, NUM)) == {number: str(number).encode() for number in range(NUM)}
    assert requests.counts[150] == 2
    requests._released.set()


def test_of_many_slow_requests_a_tenth_is_sent_again() -> None:
    slow = set(range(100, 140))
    requests = Requests(slow, enough=NUM // 10 + 1)
    fetched = dict(fetch_each(requests.get, NUM))
    assert sum(requests.counts.values()) == NUM + NUM // 10 + 1
    assert all(fetched[number] in (b"late", str(number).encode()) for number in range(NUM))


def test_a_second_request_that_fails_does_not_end_the_first() -> None:
    class Failing(Requests):
        def repeated(self, number: int) -> Exception:
            return OSError("the second request fails")

    assert dict(fetch_each(Failing({150}, enough=1).get, NUM))[150] == b"late"


def test_who_needs_no_more_gets_no_more() -> None:
    counts: Counter[int] = Counter()
    first = threading.Event()

    def get(number: int) -> bytes:
        counts[number] += 1
        if number:
            assert first.wait(60)
        return b""

    each = fetch_each(get, 10_000)
    assert next(each) == (0, b"")
    each.close()
    num_begun = sum(counts.values())
    first.set()
    assert num_begun <= fetch_many._FIRST_LIMIT + 1
    assert sum(counts.values()) <= num_begun + fetch_many._FIRST_LIMIT


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
