"""A prefetched iterator yields the same items, raises the same errors, and closes its source."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from raytrain.data.prefetch import Prefetch

TIMEOUT_S = 20.0


def test_items_come_in_order_and_every_further_call_raises_stop_iteration() -> None:
    prefetch = Prefetch(iter(range(100)), depth=3)
    assert list(prefetch) == list(range(100))
    assert list(prefetch) == []


def test_at_most_depth_items_and_one_more_are_produced_ahead() -> None:
    produced: list[int] = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            produced.append(number)
            if number == 3:
                enough.set()
            yield number

    prefetch = Prefetch(items(), depth=3)
    assert enough.wait(TIMEOUT_S)
    assert produced == [0, 1, 2, 3]
    assert list(prefetch) == list(range(10))


def test_an_error_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is full")

    prefetch = Prefetch(items(), depth=2)
    assert next(prefetch) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is full"):
            next(prefetch)


def test_close_closes_the_source_in_its_own_thread() -> None:
    closed_by: list[str] = []

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed_by.append(threading.current_thread().name)

    prefetch = Prefetch(items(), depth=1)
    next(prefetch)
    prefetch.close(TIMEOUT_S)
    assert closed_by == ["prefetch"]


_LEAVES_A_PREFETCH = """
from itertools import count
from raytrain.data.prefetch import Prefetch

def items():
    try:
        yield from count()
    finally:
        print("the thread has ended")

prefetch = Prefetch(items(), depth=2)
print(next(prefetch))
"""


@pytest.mark.not_quick
def test_the_thread_ends_before_the_process_does() -> None:
    done = subprocess.run([sys.executable, "-c", _LEAVES_A_PREFETCH], capture_output=True, text=True, check=True)
    assert done.stdout == "0\nthe thread has ended\n"
