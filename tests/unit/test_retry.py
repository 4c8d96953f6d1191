"""Transient failures are retried and counted, with growing random waits; other errors are raised at once."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from raytrain.errors import StorageError
from raytrain.storage import retries_and_hedges
from raytrain.storage.open import open_store
from raytrain.storage.request_errors import is_transient
from raytrain.storage.retries_and_hedges import DEFAULT, FAIL_FAST, RetryPolicy, take_num_retries, with_retries
from raytrain.storage.store import Store

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

    def __call__(self, *arguments: object, **options: object) -> str:
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


def test_retries_leave_the_random_numbers_of_the_loop_alone(waits: list[float]) -> None:
    random.seed(1)
    with_retries(Fails(3), DEFAULT, is_transient)
    assert len(waits) == 3 and random.getstate() == random.Random(1).getstate()


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


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENFILE, "Too many open files in system"),
        GenericError(
            "Generic S3 error: Error performing PUT: client error (Connect): Too many open files (os error 24)"
        ),
    ],
)
def test_a_process_that_has_too_many_files_open_tries_again(error: Exception, waits: list[float]) -> None:
    assert with_retries(Fails(5, error), DEFAULT, is_transient) == "done" and len(waits) == 5


@pytest.mark.parametrize("write", [lambda store: store.put("a/b", b"1"), lambda store: store.put_if("a/b", b"1", None)])
def test_a_write_to_a_folder_waits_until_other_files_are_closed(
    write: Callable[[Store], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(map(int, os.listdir("/dev/fd")))  # other tests of this process have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 32, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        assert held

        def close_all(seconds: float) -> bool:
            while held:
                os.close(held.pop())
            return True

        monkeypatch.setattr(retries_and_hedges, "sleep_unless_exiting", close_all)
        write(open_store(str(tmp_path)))
    finally:
        while held:
            os.close(held.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (tmp_path / "a/b").read_bytes() == b"1"


def test_files_that_stay_open_are_reported_with_the_limit(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", Fails(1000, OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(StorageError, match=r"as many files open as it may; raise the limit \(ulimit -n\)\.$"):
        open_store("/tmp").get("a")
    assert len(waits) == 20


@pytest.mark.not_quick
def test_a_process_ends_while_a_request_of_it_is_retried() -> None:
    subprocess.run([sys.executable, "-c", PENDING], check=True, timeout=60)  # a third of what retries may take
