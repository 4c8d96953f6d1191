"""Scaling of training with the number of workers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytrain.runs.metric_row import Kind, MetricRow

_TARGET_FRACTION = 0.95  # of the best final accuracy
_WARM_UP_FRACTION = 0.1  # of the steps, whose speed does not count


@dataclass(frozen=True, kw_only=True)
class SizeScaling:
    """The results of one number of workers. What is not known is None.

    ``images_per_s`` is the median after the first tenth of the steps, ``seconds`` are those of training, and
    ``test_accuracy`` is the last one. The gains are fractions per doubling of the workers since the next smaller size:
    0.7 is 70 % more.
    """

    workers: int
    images_per_s: float | None = None
    images_per_s_gain: float | None = None
    seconds: float | None = None
    seconds_to_target: float | None = None
    time_gain: float | None = None
    test_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The results of all numbers of workers, in ascending order.

    The gains are fractions per doubling of the workers, over all sizes; ``accuracy_spread`` is the difference between
    the best and the worst final accuracy.
    """

    target_accuracy: float | None
    images_per_s_gain: float | None
    time_gain: float | None
    accuracy_spread: float | None
    sizes: tuple[SizeScaling, ...]


@dataclass(frozen=True)
class Curve:
    """Accuracies, and the seconds of training before each of them was measured."""

    seconds: Sequence[float]
    accuracies: Sequence[float]

    @property
    def last(self) -> float | None:
        """The final accuracy; None if none was measured."""
        return self.accuracies[-1] if self.accuracies else None


def scaling(histories: Mapping[int, Sequence[MetricRow]], target_accuracy: float | None = None) -> Scaling:
    """Compare runs by their rows; they differ in their number of workers, and in what depends on it.

    ``target_accuracy`` is that on the test images, by default 95 % of the best final one.
    """
    workers = sorted(histories)
    tests = [curve(histories[size], "evaluation") for size in workers]
    final = [test.last for test in tests if test.last is not None]
    target = _TARGET_FRACTION * max(final) if target_accuracy is None and final else target_accuracy
    speeds = [images_per_s(histories[size]) for size in workers]
    times = [None if target is None else seconds_to(target, test) for test in tests]
    speed_gains, time_gains = _gains_since_previous(workers, speeds), _gains_since_previous(workers, times)
    sizes = [
        SizeScaling(
            workers=size,
            images_per_s=speeds[number],
            images_per_s_gain=speed_gains[number],
            seconds=_seconds_of_steps(histories[size])[1][-1],
            seconds_to_target=times[number],
            time_gain=time_gains[number],
            test_accuracy=tests[number].last,
        )
        for number, size in enumerate(workers)
    ]
    return Scaling(
        target_accuracy=target,
        images_per_s_gain=per_doubling(workers, speeds),
        time_gain=per_doubling(workers, times),
        accuracy_spread=max(final) - min(final) if final else None,
        sizes=tuple(sizes),
    )


def curve(rows: Sequence[MetricRow], kind: Kind) -> Curve:
    """The accuracies in the rows of one kind over the seconds of training.

    The seconds are those of the steps, including the time that they wait for data and for the first batch after a
    start. They do not include evaluations, nor the time between an interruption and the next start.
    """
    measured = [(row.step, row.accuracy) for row in rows if row.kind == kind and row.accuracy is not None]
    seconds = np.interp([step for step, _ in measured], *_seconds_of_steps(rows))
    return Curve(seconds.tolist(), [accuracy for _, accuracy in measured])


def images_per_s(rows: Sequence[MetricRow]) -> float | None:
    """The median images/s after the first tenth of the steps; None if no row has a value."""
    first = _WARM_UP_FRACTION * max((row.step for row in rows), default=0)
    speeds = [row.images_per_s for row in rows if row.step > first and row.images_per_s is not None]
    return statistics.median(speeds) if speeds else None


def seconds_to(target: float, measured: Curve) -> float | None:
    """When ``target`` was reached first, interpolated between two measurements; None if it never was."""
    reached = next((number for number, accuracy in enumerate(measured.accuracies) if accuracy >= target), None)
    if reached is None:
        return None
    around = slice(max(0, reached - 1), reached + 1)
    return float(np.interp(target, measured.accuracies[around], measured.seconds[around]))


def per_doubling(workers: Sequence[int], values: Sequence[float | None]) -> float | None:
    """The relative change of ``values`` per doubling of the workers: 0.7 is 70 % more, -0.3 is 30 % less.

    It is the slope of the least-squares line through their logarithms, so that the numbers of workers may be any. None
    if fewer than two values are known.
    """
    known = [(math.log2(size), math.log2(value)) for size, value in zip(workers, values, strict=True) if value]
    if len(known) < 2:
        return None
    return 2 ** statistics.linear_regression(*zip(*known, strict=True)).slope - 1


def _gains_since_previous(workers: Sequence[int], values: Sequence[float | None]) -> list[float | None]:
    """The change per doubling since the next smaller size; None for the smallest."""
    pairs = itertools.pairwise(range(len(workers)))
    return [None, *(per_doubling([workers[a], workers[b]], [values[a], values[b]]) for a, b in pairs)]


def _seconds_of_steps(rows: Sequence[MetricRow]) -> tuple[list[int], list[float]]:
    """Steps, and the seconds of training up to each: the images since the row before, divided by the row's images/s."""
    steps, seconds, samples = [0], [0.0], 0
    for row in rows:
        if row.images_per_s and row.samples_seen is not None:
            steps.append(row.step)
            seconds.append(seconds[-1] + (row.samples_seen - samples) / row.images_per_s)
            samples = row.samples_seen
    return steps, seconds
