"""How training scales: what more workers gain in images/s and in time to an accuracy or another metric.

All figures are computed from the histories of runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raytrain.experiments.best_metric import ACCURACY, BestMetric
from raytrain.runs.metric_row import Kind, MetricRow

_TARGET_MARGIN = 0.05  # by which the target is worse than the best final value
_WARM_UP_FRACTION = 0.1  # of the steps; their speed does not count


@dataclass(frozen=True, kw_only=True)
class Size:
    """A run on some number of workers, and its figures. Unknown figures are None.

    ``batch_size`` and ``learning_rate`` are global. ``images_per_s`` is the median after the first tenth of the steps,
    ``seconds`` the time in steps, ``seconds_to_target`` the part of it until the metric reached the target, and
    ``value`` the last value of the metric. A gain is the relative change per doubling of the workers since the next
    smaller size: 0.7 is 70 % more.

    Example::

        for size in raytrain.sweep(config, vary="workers=1,2,4").scaling[0].sizes:
            print(size.workers, size.images_per_s, size.seconds_to_target)
    """

    run: str
    workers: int
    status: str
    batch_size: int | None = None
    learning_rate: float | None = None
    images_per_s: float | None = None
    images_per_s_gain: float | None = None
    seconds: float | None = None
    seconds_to_target: float | None = None
    time_gain: float | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Runs that differ in their number of workers, from the fewest up. Gains are relative changes per doubling.

    ``values`` are those of the other options that a sweep varies: each combination of them has a scaling of its own.
    ``target`` is the value of ``metric`` up to which runs are timed; ``spread`` is the difference between the largest
    and the smallest of their last values.

    Example::

        scaling = raytrain.sweep(config, vary="workers=1,2,4").scaling[0]
        print(scaling.images_per_s_gain)  # 0.9: 90 % more images/s for each doubling of the workers
    """

    values: dict[str, Any]
    metric: str
    target: float | None
    images_per_s_gain: float | None
    time_gain: float | None
    spread: float | None
    sizes: tuple[Size, ...]


class Curve(NamedTuple):
    """Values of a metric, and the seconds of training before each of them was measured."""

    seconds: Sequence[float]
    values: Sequence[float]


def scaling(
    runs: Sequence[Size],
    histories: Mapping[str, Sequence[MetricRow]],
    target: float | None = None,
    values: Mapping[str, Any] | None = None,
    metric: BestMetric = ACCURACY,
) -> Scaling:
    """Compare ``runs`` by ``histories``, which has the rows of each finished run by its name.

    The sizes of the result are in the order of their workers; those of runs without a history stay as they are.
    ``target`` is a value of ``metric`` on the validation images, by default :func:`default_target` of these runs, and
    ``values`` are those of the other options, which the result keeps.

    Example: ``scaling([Size(run="a", workers=1, status="finished"), …], {"a": rows, …}).images_per_s_gain``
    """
    sizes = sorted(runs, key=lambda size: size.workers)
    finished = [size for size in sizes if size.run in histories]
    if target is None:
        target = default_target((histories[size.run] for size in finished), metric)

    # The images/s and the seconds to the target of each finished run, and how they change from size to size.
    workers = [size.workers for size in finished]
    evaluations = [curve(histories[size.run], "evaluation", metric.name) for size in finished]
    speeds = [images_per_s(histories[size.run]) for size in finished]
    times = [None if target is None else seconds_to(target, measured, metric) for measured in evaluations]
    speed_gains, time_gains = _gains_since_previous(workers, speeds), _gains_since_previous(workers, times)
    size_of_run = {
        size.run: dataclasses.replace(
            size,
            images_per_s=speeds[number],
            images_per_s_gain=speed_gains[number],
            seconds=_seconds_of_steps(histories[size.run])[1][-1],
            seconds_to_target=times[number],
            time_gain=time_gains[number],
            value=next(reversed(evaluations[number].values), None),
        )
        for number, size in enumerate(finished)
    }
    final = [measured.values[-1] for measured in evaluations if measured.values]
    return Scaling(
        values=dict(values or {}),
        metric=metric.name,
        target=target,
        images_per_s_gain=per_doubling(workers, speeds),
        time_gain=per_doubling(workers, times),
        spread=max(final) - min(final) if final else None,
        sizes=tuple(size_of_run.get(size.run, size) for size in sizes),
    )


def default_target(histories: Iterable[Sequence[MetricRow]], metric: BestMetric = ACCURACY) -> float | None:
    """Return a value 5 % worse than the best final one, so that most runs reach it; None if no run was evaluated."""
    evaluations = [curve(rows, "evaluation", metric.name) for rows in histories]
    final = [measured.values[-1] for measured in evaluations if measured.values]
    if not final:
        return None
    best = max(final, key=metric.score)
    margin = _TARGET_MARGIN * abs(best)
    return best + margin if metric.is_lower_better else best - margin


def curve(rows: Sequence[MetricRow], kind: Kind, metric: str = "accuracy") -> Curve:
    """Return the values of a ``metric`` in the rows of one ``kind`` over the seconds of training.

    Rows without a value are left out. The seconds are the time in steps, which includes waiting for data, also for the
    first batch of an attempt. They do not include evaluations, nor the time between two attempts.
    """
    rows_of_kind = [(row.step, row.metrics.get(metric)) for row in rows if row.kind == kind]
    measured = [(step, value) for step, value in rows_of_kind if value is not None]
    # An evaluation may come between two rows with a speed, so its time is interpolated between theirs.
    seconds = np.interp([step for step, _ in measured], *_seconds_of_steps(rows))
    return Curve(seconds.tolist(), [value for _, value in measured])


def images_per_s(rows: Sequence[MetricRow]) -> float | None:
    """Return the median images/s after the first tenth of the steps; None if no row has a value."""
    # In the first steps, code is compiled, caches are filled and pools of memory grow.
    last_of_warm_up = _WARM_UP_FRACTION * max((row.step for row in rows), default=0)
    speeds = [row.images_per_s for row in rows if row.step > last_of_warm_up and row.images_per_s is not None]
    return statistics.median(speeds) if speeds else None


def seconds_to(target: float, measured: Curve, metric: BestMetric = ACCURACY) -> float | None:
    """Return the seconds of training until ``target`` was reached first; None if it never was.

    They are interpolated between the first measurement that reaches it and the one before, if there is one.
    """
    scores = [metric.score(value) for value in measured.values]
    target_score = metric.score(target)
    reached = next((number for number, score in enumerate(scores) if score >= target_score), None)
    if reached is None:
        return None
    interval = slice(max(0, reached - 1), reached + 1)
    return float(np.interp(target_score, scores[interval], measured.seconds[interval]))


def per_doubling(workers: Sequence[int], values: Sequence[float | None]) -> float | None:
    """Return the relative change of ``values`` per doubling of the workers: 0.7 is 70 % more, -0.3 is 30 % less.

    It is the slope of the least-squares line through the logarithms of workers and values, so the numbers of workers
    need not be powers of two. Values that are None or 0, which has no logarithm, are left out; returns None if fewer
    than two are left.
    """
    points = [(math.log2(size), math.log2(value)) for size, value in zip(workers, values, strict=True) if value]
    if len(points) < 2:
        return None
    # A slope of 1 is twice the value for twice the workers.
    return 2 ** statistics.linear_regression(*zip(*points, strict=True)).slope - 1


def _gains_since_previous(workers: Sequence[int], values: Sequence[float | None]) -> list[float | None]:
    """Return, for each size, the change of ``values`` per doubling since the next smaller size.

    It is None for the smallest size, and if one of the two values is unknown.
    """
    pairs = itertools.pairwise(zip(workers, values, strict=True))
    return [None, *(per_doubling([few, more], [before, value]) for (few, before), (more, value) in pairs)]


def _seconds_of_steps(rows: Sequence[MetricRow]) -> tuple[list[int], list[float]]:
    """Return the steps whose rows have a speed, after a 0, and the seconds of training up to each of them.

    The time between two rows is the number of images between them, divided by the images/s of the later one.
    """
    steps, seconds, samples = [0], [0.0], 0
    for row in rows:
        if row.images_per_s and row.samples_seen is not None:
            steps.append(row.step)
            seconds.append(seconds[-1] + (row.samples_seen - samples) / row.images_per_s)
            samples = row.samples_seen
    return steps, seconds
