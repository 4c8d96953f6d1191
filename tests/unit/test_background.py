"""A call that hangs, such as one to storage, does not stop the loop that makes it."""

from __future__ import annotations

import threading

import pytest

from raytrain.runs.background_and_throttle import Background
from tests.helpers.waiting import wait_for

WAIT_S = 60.0


def last(background: Background[int, int]) -> int | None:
    """What the first call returned, once it has."""
    return wait_for(lambda: background(2))


def test_a_call_that_hangs_does_not_stop_the_caller_and_its_result_comes_later() -> None:
    released = threading.Event()
    called: list[int] = []

    def hang(number: int) -> int:
        called.append(number)
        assert released.wait(WAIT_S)
        return 10 * number

    background = Background(hang)
    assert [background(1), background(2), background(2)] == [None, None, None]
    released.set()
    assert last(background) == 10
    background.close()
    assert called == [1, 2]


def test_the_caller_gets_what_a_call_raised() -> None:
    def fail(number: int) -> int:
        raise KeyError(number)

    background = Background(fail)
    background(1)
    with pytest.raises(KeyError, match="1"):
        last(background)
    background.close()
