"""Waits for machines that the cluster's autoscaler starts because a run asks for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray

from raytrain.backends.placement import available_workers, wanted
from raytrain.backends.ray.hardware import cluster_hardware
from raytrain.config import TrainConfig
from raytrain.errors import UsageError

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
    if fewest <= available_workers(device, found):
        return
    worker = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
    # The autoscaler sees a group that has no room as a request for machines. It ends with this process at the latest.
    group = ray.util.placement_group([worker] * fewest)
    try:
        started = said = time.monotonic()
        seen = None
        while not group.wait(_LOOK_EVERY_S):
            now, num_devices = time.monotonic(), available_workers(device, cluster_hardware())
            if is_stopped():
                raise KeyboardInterrupt
            if now - started > config.wait_for_machines_s:
                raise UsageError(_too_few(config, num_devices, device))
            if num_devices != seen or now - said > _SAY_EVERY_S:
                seen, said = num_devices, now
                _LOG.warning(
                    "Waiting for machines: there is room for %d of %d workers after %.0f of %.0f s.",
                    *(min(num_devices, fewest), fewest, now - started, config.wait_for_machines_s),
                )
    finally:
        ray.util.remove_placement_group(group)


def _too_few(config: TrainConfig, num_devices: int, device: str) -> str:
    kind = "GPUs" if device == "cuda" else "CPUs"
    return (
        f"--workers is {config.workers}, and after {config.wait_for_machines_s:g} s the cluster has {num_devices} "
        f"{kind}; `ray status` says why no more machines came. Ask for fewer workers, or raise --wait-for-machines-s."
    )
