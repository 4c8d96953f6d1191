"""Whether workers that do not start wait for what other work keeps: Ray would wait for ever, and say nothing."""

from __future__ import annotations

import time
from typing import Any

import ray

from raytrain.backends.ray.cluster import Placement
from raytrain.errors import UsageError
from raytrain.runs.throttle import Throttle

_PLACED_WITHIN_S = 40.0
_LOOK_EVERY_S = 5.0


class CapacityCheck:
    """Looks now and then, from a while after it was made, whether workers of ``placement`` find none."""

    def __init__(self, placement: Placement, num_workers: int) -> None:
        self._placement = placement
        self._num_workers = num_workers
        self._begun = time.monotonic()
        self._throttle = Throttle()
        self._waiting: set[str] = set()

    def check(self) -> None:
        """Raise UsageError where workers wait now that waited the last time: those that just begin again wait for a moment, too."""
        if time.monotonic() - self._begun < _PLACED_WITHIN_S or not self._throttle.due("look", _LOOK_EVERY_S):
            return
        waiting = _waiting_groups()
        if waiting & self._waiting:
            raise UsageError(self._sentence())
        self._waiting = waiting

    def _sentence(self) -> str:
        free = ray.available_resources()
        needed = {"CPU": self._placement.cpus, **({"GPU": 1.0} if self._placement.device == "cuda" else {})}
        each = " and ".join(f"{amount:g} {kind}s" for kind, amount in needed.items())
        there = " and ".join(f"{free.get(kind, 0.0):g} {kind}s" for kind in needed)
        return (
            f"There is no room for {self._num_workers} workers of {each} each: the cluster has {there} free, the rest is taken by other "
            "work; wait for that, or ask for fewer --workers."
        )


def _waiting_groups() -> set[str]:
    """The placement groups of this driver that have no place yet; a group's number ends with its driver's."""
    driver: str = ray.get_runtime_context().get_job_id()
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    return {number for number, group in groups.items() if group["state"] == "PENDING" and number.endswith(driver)}
