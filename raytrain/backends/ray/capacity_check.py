"""Detects workers that cannot be scheduled because other jobs hold the resources: Ray would wait for ever, silently."""

from __future__ import annotations

import time
from typing import Any

import ray

from raytrain.backends.placement import Placement, device_kind
from raytrain.errors import UsageError
from raytrain.runs.throttle import Throttle

_PLACED_WITHIN_S = 40.0
_LOOK_EVERY_S = 5.0


class CapacityCheck:
    """Looks every few seconds, from 40 s after it was created, whether workers of ``placement`` find no room."""

    def __init__(self, placement: Placement, num_workers: int) -> None:
        self._placement = placement
        self._num_workers = num_workers
        self._created = time.monotonic()
        self._throttle = Throttle()
        self._waiting: set[str] = set()

    def check(self) -> None:
        """Raise UsageError if the same workers wait as at the last look: those that restart wait for a moment, too."""
        if time.monotonic() - self._created < _PLACED_WITHIN_S or not self._throttle.due("look", _LOOK_EVERY_S):
            return
        waiting = _waiting_groups()
        if waiting & self._waiting:
            raise UsageError(self._sentence())
        self._waiting = waiting

    def _sentence(self) -> str:
        free = ray.available_resources()
        placed = self._placement
        each = f"{placed.cpus:g} CPUs"
        there = f"{free.get('CPU', 0.0):g} CPUs"
        if placed.device == "cuda":
            each += f" and 1 {device_kind(placed.accelerator_type, placed.device)}"
            there += f" and {free.get('GPU', 0.0):g} GPUs"
        return (
            f"There is no room for {self._num_workers} workers of {each} each: the cluster has {there} free, and other "
            "jobs use the rest; wait for them, or ask for fewer --workers."
        )


def _waiting_groups() -> set[str]:
    """The placement groups of this driver that are not placed yet; a group's id ends with its driver's id."""
    driver: str = ray.get_runtime_context().get_job_id()
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    return {number for number, group in groups.items() if group["state"] == "PENDING" and number.endswith(driver)}
