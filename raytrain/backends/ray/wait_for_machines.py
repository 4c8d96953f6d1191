"""Waits for machines that the cluster's autoscaler starts because a run asks for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray

from raytrain.backends.placement import available_workers, device_kind, wanted
from raytrain.backends.ray.hardware import cluster_hardware, worker_resources
from raytrain.backends.ray.private_api import autoscaler_problems
from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.runs.printable import one_line

_LOG = logging.getLogger("raytrain")
_LOOK_EVERY_S = 0.5
_SAY_EVERY_S = 60.0


def wait_for_machines(config: TrainConfig, is_stopped: Callable[[], bool]) -> None:
    """Ask the cluster for room for the workers, and wait for it up to ``config.wait_for_machines_s``.

    Raises UsageError if it has too little room even then, and KeyboardInterrupt once ``is_stopped``.
    """
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
        while not group.wait(_LOOK_EVERY_S):
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
