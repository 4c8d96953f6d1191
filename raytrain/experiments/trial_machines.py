"""The machines of a sweep's trials: how many trials train at once, and on which workers and GPUs."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.experiments.sweep_plan import Sweep
from raytrain.launch.gpus import gpus
from raytrain.launch.placement import Hardware, Placement, check_room, place


@dataclass(frozen=True)
class TrialMachines:
    """How many trials train ``at_once``, and the ``placement`` of the workers of all of these."""

    at_once: int
    placement: Placement

    @property
    def of_one_trial(self) -> Placement:
        """The placement of one trial's workers. If their number varies between trials, it is 1 here."""
        workers = self.placement.num_workers // self.at_once
        return dataclasses.replace(self.placement, num_workers=workers, min_workers=workers)

    def gpus_of_trials(self, config: TrainConfig) -> list[str | None]:
        """Return the numbers of this machine's GPUs, such as ``0,1``, for each trial that trains at the same time.

        They are None if nothing is to be divided: Ray assigns the GPUs of a cluster, and a trial that trains alone
        takes as many as it needs. Raises UsageError if CUDA_VISIBLE_DEVICES names GPUs otherwise than by numbers.
        """
        if config.backend == "ray" or self.placement.device == "cpu" or self.at_once == 1:
            return [None] * self.at_once
        visible = config.gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = [number.strip() for number in visible.split(",")] if visible else list(map(str, range(len(gpus()))))
        if not all(number.isdecimal() for number in numbers):  # CUDA also takes UUIDs, such as GPU-8f6c… and MIG-…
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES is {visible}; a sweep gives each trial GPUs by their numbers: name those that "
                "`raytrain devices` lists by --device, such as cuda:0,1."
            )
        workers = self.of_one_trial.num_workers
        return [",".join(numbers[first : first + workers]) for first in range(0, self.at_once * workers, workers)]


def divide_machines(planned: Sweep, config: TrainConfig, hardware: Hardware) -> TrialMachines:
    """Divide the machines of a sweep, whose trials share the options of ``config``, among its trials.

    Raises UsageError if they have too little room for one trial.
    """
    workers = 1 if planned.varies_workers or config.workers == "auto" else int(config.workers)
    check_room(dataclasses.replace(config, workers=workers), hardware)
    # As many trials train at once as their workers fit; workers beyond those would only take cores from reading.
    most_workers = place(dataclasses.replace(config, workers="auto"), hardware).num_workers
    at_once = 1 if planned.trains_alone else max(1, min(most_workers // workers, planned.num_trials))
    return TrialMachines(at_once, place(dataclasses.replace(config, workers=at_once * workers), hardware))
