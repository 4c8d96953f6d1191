"""From what a profiler recorded to where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
"""Start and end, in microseconds."""
PHASES = ("waiting for data", "copy and augmentation", "forward", "backward", "all-reduce", "optimizer", "other")


@dataclass(frozen=True)
class Ranges:
    """What one worker did in its profiled steps."""

    steps: Sequence[Interval]
    waits: Sequence[Interval]  # for the next batch
    bodies: Sequence[Interval]  # of the loop: from a batch to the request for the next one
    backwards: Sequence[Interval]
    optimizers: Sequence[Interval]
    collectives: Sequence[Interval]  # sums over the workers
    computing: Sequence[Interval]


def phase_seconds(ranges: Ranges) -> dict[str, float]:
    """The seconds of an average step that each of :data:`PHASES` takes; their sum is the step's.

    All-reduce is only what no computing hides: the time in which a worker does nothing but wait for the others. It is
    taken out of the phase that it falls into.
    """
    alone = subtract(merge(ranges.collectives), merge(ranges.computing))
    copies = [(wait[1], body[0]) for wait, body in zip(ranges.waits, ranges.bodies, strict=False)]
    backward, optimizer = merge(ranges.backwards), merge(ranges.optimizers)
    forwards = [
        (body[0], max((end for _, end in intersect([body], backward)), default=body[0])) for body in ranges.bodies
    ]
    phases = {
        "waiting for data": merge(ranges.waits),
        "copy and augmentation": merge(copies),
        "forward": subtract(merge(forwards), backward),
        "backward": backward,
        "optimizer": optimizer,
    }
    steps = merge(ranges.steps)
    lengths = {name: length(subtract(intersect(steps, phase), alone)) for name, phase in phases.items()}
    lengths["all-reduce"] = length(intersect(steps, alone))
    lengths["other"] = length(steps) - sum(lengths.values())
    return {name: lengths[name] / len(ranges.steps) / 1e6 for name in PHASES}


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that are in order and do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The times that are in both; both are in order, without overlaps."""
    found: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The times of ``some`` that are not in ``others``; both are in order, without overlaps."""
    edges = [float("-inf"), *(edge for interval in others for edge in interval), float("inf")]
    return intersect(some, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - start for start, end in intervals)
