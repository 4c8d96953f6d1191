"""Transient failures are retried and counted, with growing random waits; other errors are raised at once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from raytrain.storage import retries_and_hedges
from raytrain.storage.request_errors import is_transient
from raytrain.storage.retries_and_hedges import DEFAULT, FAIL_FAST, RetryPolicy, take_num_retries, with_retries

BUSY = GenericError(
    "Error performing GET - Server returned non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>"
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits in seconds, which are recorded instead of slept."""
    recorded: list[float] = []

    def record(seconds: float) -> bool:
        recorded.append(seconds)
        return True

    monkeypatch.setattr(retries_and_hedges, "sleep_unless_exiting", record)
    return recorded


class Fails:
    def __init__(self, times: int, error: Exception = BUSY) -> None:
        self.times, self.error = times, error

    def __call__(self) -> str:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return "done"


def test_retries_are_counted_and_their_waits_grow_and_vary(waits: list[float]) -> None:
    take_num_retries()
    assert [with_retries(Fails(12), DEFAULT, is_transient) for _ in range(50)] == ["done"] * 50
    assert take_num_retries() == 50 * 12
    by_attempt = [waits[attempt::12] for attempt in range(12)]
    assert all(max(some) <= min(15.0, 0.1 * 2**attempt) for attempt, some in enumerate(by_attempt))
    means = [sum(some) / 50 for some in by_attempt]
    assert means[0] < 0.1 < means[4] < means[7] and means[-1] > 5
    assert len(set(by_attempt[-1])) == 50


@pytest.mark.parametrize("policy", [FAIL_FAST, RetryPolicy(7, 60.0), RetryPolicy(0, 60.0)])
def test_retries_end_after_the_maximum_number_of_attempts(policy: RetryPolicy, waits: list[float]) -> None:
    operation = Fails(1000)
    with pytest.raises(GenericError):
        with_retries(operation, policy, is_transient)
    assert len(waits) == policy.max_retries
    assert 1000 - operation.times == 1 + policy.max_retries


def test_the_time_of_the_first_attempt_counts(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Counter[str]()

    def slow() -> None:
        clock["s"] += 6
        raise BUSY

    monkeypatch.setattr(retries_and_hedges.time, "monotonic", lambda: clock["s"])
    with pytest.raises(GenericError):
        with_retries(slow, FAIL_FAST, is_transient)
    assert len(waits) == 1  # One more attempt after 6 s, none after 12 s.


@pytest.mark.parametrize(
    "error", [PermissionDeniedError("status code: 403 Forbidden"), FileNotFoundError("a"), OSError(28, "full")]
)
def test_errors_that_are_not_transient_are_raised_at_once(error: Exception, waits: list[float]) -> None:
    with pytest.raises(type(error)):
        with_retries(Fails(1, error), DEFAULT, is_transient)
    assert not waits


PENDING = """
import threading
from obstore.exceptions import GenericError
from raytrain.storage.request_errors import is_transient
from raytrain.storage.retries_and_hedges import DEFAULT, request_threads, with_retries

begun = threading.Event()

def busy():
    begun.set()
    raise GenericError("Error performing GET - Server returned non-2xx status code: 503 Service Unavailable")

request_threads().submit(with_retries, busy, DEFAULT, is_transient)
begun.wait()
"""


@pytest.mark.not_quick
def test_a_process_ends_while_a_request_of_it_is_retried() -> None:
    subprocess.run([sys.executable, "-c", PENDING], check=True, timeout=60)  # a third of what retries may take
