"""A history of any length in bounded memory."""

from __future__ import annotations

from itertools import pairwise

from raytrain.runs.metrics_history import Sample


def parity(number: int) -> int:
    return number % 2


def test_a_short_history_is_kept_whole() -> None:
    sample = Sample(parity, size=10)
    for number in range(20):
        sample.extend([number])
    assert sample.rows == list(range(20))
    assert sample.since(15) == (15, [15, 16, 17, 18, 19])


def test_of_a_long_one_the_newest_are_kept_and_as_many_of_each_kind_before_them() -> None:
    sample = Sample(parity, size=10)
    for number in range(100_000):
        sample.extend([number])
    assert sample.rows == sorted(sample.rows) and sample.rows[-10:] == list(range(99_990, 100_000))
    assert len(sample.rows) <= 40 and sample.num_rows == 100_000
    for kind in (0, 1):
        older = [number for number in sample.rows if number < 99_980 and parity(number) == kind]
        assert len(older) >= 5
        assert len({after - before for before, after in pairwise(older)}) == 1, "evenly"


def test_who_reads_often_gets_every_row_and_who_comes_late_gets_the_sample() -> None:
    sample, seen, own = Sample(parity, size=10), list[int](), Sample(parity, size=5)
    for first in range(0, 1000, 7):
        sample.extend(range(first, first + 7))
        first_row, rows = sample.since(len(seen))
        assert first_row == len(seen)
        seen += rows
        own.follow(first_row, rows)
    assert seen == list(range(1001))
    assert sample.since(3) == (0, sample.rows)
    assert own.rows[-5:] == seen[-5:] and len(own.rows) <= 20
    own.follow(*sample.since(3))
    assert own.num_rows == len(sample.rows)


def test_what_is_not_wanted_is_dropped() -> None:
    sample = Sample(parity, size=10)
    sample.extend(range(1000))
    sample.keep(lambda number: number <= 500)
    assert max(sample.rows) <= 500
    sample.extend([501, 502])
    assert sample.rows[-2:] == [501, 502] and sample.rows == sorted(sample.rows)
    assert sample.num_rows == len(sample.rows)
