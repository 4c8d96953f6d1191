"""How training scales with its workers, from the histories of runs of several sizes: images/s, and the time to an accuracy."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytrain.runs.history import Row

FIGURES = ("images_per_s", "images_per_s_gain", "seconds", "seconds_to_target", "time_gain", "test_accuracy")
"""What :func:`scaling` tells of each size."""
_TARGET_FRACTION = 0.95  # of the best accuracy that a size ends with
_WARM_UP_FRACTION = 0.1  # of the steps, whose pace does not count


@dataclass(frozen=True)
class Curve:
    """Accuracies, and the seconds of training before each of them was measured."""

    seconds: Sequence[float]
    accuracies: Sequence[float]

    @property
    def last(self) -> float | None:
        """The accuracy that the run ended with; None where none was measured."""
        return self.accuracies[-1] if self.accuracies else None


def scaling(histories: Mapping[int, Sequence[Row]], target_accuracy: float | None = None) -> dict[str, Any]:
    """What the sizes of a study make of it, from the history of each: ``histories`` by the number of workers.

    Args:
        histories: rows of finished runs that differ in nothing but their workers, and what goes by them.
        target_accuracy: on the test images; by default 95 % of the best that a size ends with.

    Returns:
        target_accuracy; images_per_s_gain and time_gain: by what part a doubling of the workers changes images_per_s and
        seconds_to_target, over all sizes; accuracy_spread; and sizes, a dictionary for each in ascending order: workers,
        images_per_s (median after the first tenth of the steps), seconds (of training), seconds_to_target, test_accuracy (the
        last), and the two gains for each doubling since the size before. What is not known is None.
    """
    workers = sorted(histories)
    tests = [curve(histories[size], "evaluation") for size in workers]
    ends = [test.last for test in tests]
    known = [end for end in ends if end is not None]
    target = _TARGET_FRACTION * max(known) if target_accuracy is None and known else target_accuracy
    paces = [images_per_s(histories[size]) for size in workers]
    times = [None if target is None else seconds_to(target, test) for test in tests]
    seconds = [_training(histories[size])[1][-1] for size in workers]
    columns = (workers, paces, _since_before(workers, paces), seconds, times, _since_before(workers, times), ends)
    return {
        "target_accuracy": target,
        "images_per_s_gain": per_doubling(workers, paces),
        "time_gain": per_doubling(workers, times),
        "accuracy_spread": max(known) - min(known) if known else None,
        "sizes": [dict(zip(("workers", *FIGURES), size, strict=True)) for size in zip(*columns, strict=True)],
    }


def curve(rows: Sequence[Row], kind: str) -> Curve:
    """The accuracies in the rows of one kind, ``step`` or ``evaluation``, over the seconds of training.

    These are the seconds of the steps with their waiting for data, for the first batch after a start too. What evaluations took, and
    what lay between an interruption and the start after it, is no part of them.
    """
    measured = [row for row in rows if row["kind"] == kind and row.get("accuracy") is not None]
    seconds = np.interp([row["step"] for row in measured], *_training(rows))
    return Curve(seconds.tolist(), [row["accuracy"] for row in measured])


def images_per_s(rows: Sequence[Row]) -> float | None:
    """The median pace after the first tenth of the steps; None where no row tells one."""
    first = _WARM_UP_FRACTION * max((row["step"] for row in rows), default=0)
    paces = [row["images_per_s"] for row in rows if row["step"] > first and row.get("images_per_s") is not None]
    return statistics.median(paces) if paces else None


def seconds_to(target: float, measured: Curve) -> float | None:
    """When ``target`` was first reached, on the line between the measurements around that; None where it never was."""
    reached = next((number for number, accuracy in enumerate(measured.accuracies) if accuracy >= target), None)
    if reached is None:
        return None
    around = slice(max(0, reached - 1), reached + 1)
    return float(np.interp(target, measured.accuracies[around], measured.seconds[around]))


def per_doubling(workers: Sequence[int], values: Sequence[float | None]) -> float | None:
    """By what part ``values`` change where the workers double: 0.7 for 70 % more, -0.3 for 30 % less; None for fewer than two values.

    The slope of the line of least squares through their logarithms: the numbers of workers need be no powers of two.
    """
    known = [(math.log2(size), math.log2(value)) for size, value in zip(workers, values, strict=True) if value]
    if len(known) < 2:
        return None
    return 2 ** statistics.linear_regression(*zip(*known, strict=True)).slope - 1


def _since_before(workers: Sequence[int], values: Sequence[float | None]) -> list[float | None]:
    """The change for each doubling since the size before; none for the first."""
    steps = itertools.pairwise(range(len(workers)))
    return [None, *(per_doubling([workers[a], workers[b]], [values[a], values[b]]) for a, b in steps)][: len(workers)]


def _training(rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Steps, and the seconds of training up to each: the images that its row adds, at that row's pace."""
    steps, seconds, samples = [0], [0.0], 0
    for row in rows:
        if row.get("images_per_s"):
            steps.append(row["step"])
            seconds.append(seconds[-1] + (row["samples_seen"] - samples) / row["images_per_s"])
            samples = row["samples_seen"]
    return steps, seconds
