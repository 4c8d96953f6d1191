"""Ray Train without the parts that a run here has no use for (each is a process that takes seconds of a CPU to start), and with an end."""

from __future__ import annotations

from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.callback import ControllerCallback

_HANDS_OUT_DATASETS = "DatasetsCallback"  # a run's data comes to its workers another way
_CLEANS_UP_AFTER_THE_CONTROLLER = "PlacementGroupCleanerCallback"  # what it would free ends with a cluster of our own


class Trainer(TorchTrainer):
    """A ``TorchTrainer`` that starts fewer processes; ``own_cluster`` says that the cluster ends with this process.

    Its controller makes itself known to ``actor``: whoever has it can end the workers, where Ray Train would start them again.
    """

    def __init__(self, *args: Any, coordinator: Any, own_cluster: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._coordinator = coordinator
        self._left_out = {_HANDS_OUT_DATASETS} | ({_CLEANS_UP_AFTER_THE_CONTROLLER} if own_cluster else set())

    def _create_default_callbacks(self) -> list[Any]:
        kept = [each for each in super()._create_default_callbacks() if type(each).__name__ not in self._left_out]
        return [*kept, _TellOfController(self._coordinator)]


class _TellOfController(ControllerCallback):
    """Gives a run's actor the handle of the process that starts and watches its workers."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_controller_start(self, train_run_context: Any) -> None:
        """See :class:`ControllerCallback`; called in that process."""
        self._coordinator.controlled_by.remote(ray.get_runtime_context().current_actor)
