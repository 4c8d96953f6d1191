"""Watches the cluster of a run: waits for machines, notices workers without room and a head that does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.launch.placement import Placement, available_workers, device_kind, wanted
from raytrain.launch.ray.nodes import cluster_hardware, worker_resources
from raytrain.launch.ray.private_api import autoscaler_problems, head_answers
from raytrain.monitor.events import Event, HeadBack, HeadSilent
from raytrain.runs.background import Background, Throttle
from raytrain.runs.redact import one_line

_PLACED_WITHIN_S = 40.0
_LOOK_EVERY_S = 5.0


class CapacityCheck:
    """Looks every few seconds whether workers of ``placement`` have found no room for 40 s."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._throttle = Throttle()
        self._since: dict[str, float] = {}  # when each placement group that waits was first seen

    def check(self) -> None:
        """Raise UsageError if the same workers have waited too long: those that start or restart wait a moment, too."""
        if not self._throttle.due("look", _LOOK_EVERY_S):
            return
        now, waiting = time.monotonic(), _waiting_groups()
        if any(now - self._since[group] >= _PLACED_WITHIN_S for group in waiting & self._since.keys()):
            raise UsageError(self._sentence())
        self._since = {group: self._since.get(group, now) for group in waiting}

    def _sentence(self) -> str:
        free = ray.available_resources()
        placed = self._placement
        each = f"{placed.cpus:g} CPUs"
        there = f"{free.get('CPU', 0.0):g} CPUs"
        if placed.device == "cuda":
            each += f" and 1 {device_kind(placed.accelerator_type, placed.device)}"
            there += f" and {free.get('GPU', 0.0):g} GPUs"
        return (
            f"There is no room for {placed.min_workers} workers of {each} each: the cluster has {there} free, and "
            "other jobs use the rest; wait for them, or ask for fewer --workers."
        )


def _waiting_groups() -> set[str]:
    """The placement groups of this driver that are not placed yet; a group's id ends with its driver's id."""
    driver: str = ray.get_runtime_context().get_job_id()
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    return {number for number, group in groups.items() if group["state"] == "PENDING" and number.endswith(driver)}


_LOG = logging.getLogger("raytrain")
_ASK_EVERY_S = 0.5
_SAY_EVERY_S = 60.0


def wait_for_machines(config: TrainConfig, is_stopped: Callable[[], bool]) -> None:
    """Ask the cluster for room for the workers, and wait for it; raises UsageError if it does not come in time."""
    if not config.wait_for_machines_s:
        return
    found = cluster_hardware()
    device, fewest, _ = wanted(config, found)
    if fewest <= available_workers(config, device, found):
        return
    worker = worker_resources(device, 1.0, config.accelerator_type)
    # The autoscaler sees a group that has no room as a request for machines. It ends with this process at the latest.
    group = ray.util.placement_group([worker] * fewest)
    try:
        started = said = time.monotonic()
        seen: tuple[int, list[str]] | None = None
        while not group.wait(_ASK_EVERY_S):
            now, num_devices = time.monotonic(), available_workers(config, device, cluster_hardware())
            problems = autoscaler_problems()
            if is_stopped():
                raise KeyboardInterrupt
            if now - started > config.wait_for_machines_s:
                raise UsageError(_too_few(config, num_devices, device, problems))
            if (num_devices, problems) != seen or now - said > _SAY_EVERY_S:
                seen, said = (num_devices, problems), now
                _LOG.warning(
                    "Waiting for machines: there is room for %d of %d workers after %.0f of %.0f s.%s",
                    *(min(num_devices, fewest), fewest, now - started, config.wait_for_machines_s),
                    _in_the_clouds_words(problems),
                )
    finally:
        ray.util.remove_placement_group(group)


def _too_few(config: TrainConfig, num_devices: int, device: str, problems: list[str]) -> str:
    why = _in_the_clouds_words(problems) or " `ray status` says why no more machines came."
    return (
        f"--workers is {config.workers}, and after {config.wait_for_machines_s:g} s the cluster has {num_devices} "
        f"{device_kind(config.accelerator_type, device)}.{why} Ask for fewer workers, or raise --wait-for-machines-s."
    )


def _in_the_clouds_words(problems: list[str]) -> str:
    listed = "; ".join(one_line(each).rstrip(".") for each in problems)
    return f" The autoscaler cannot start machines ({listed})." if problems else ""


_ASK_HEAD_EVERY_S = 5.0
_ANSWER_WITHIN_S = 10.0


class HeadWatch:
    """Asks the head every few seconds, and calls ``event`` if it stops answering, and if it is back."""

    def __init__(self, event: Callable[[Event], None]) -> None:
        self._event = event
        self._ask = Background(head_answers)  # a question takes long if nobody answers
        self._throttle = Throttle()
        self._there = True

    def look(self) -> None:
        """Tell what the last question brought, and ask again."""
        if not self._throttle.due("ask", _ASK_HEAD_EVERY_S):
            return
        answered = self._ask(_ANSWER_WITHIN_S)
        if answered is None or answered == self._there:
            return
        self._there = answered
        self._event(HeadBack() if answered else HeadSilent())

    def close(self) -> None:
        """Ask no more."""
        self._ask.close()
