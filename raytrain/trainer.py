"""Ray Train without the parts that a run here has no use for: each is a process that takes seconds of a CPU to start."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer

_HANDS_OUT_DATASETS = "DatasetsCallback"  # a run's data comes to its workers another way
_CLEANS_UP_AFTER_THE_CONTROLLER = "PlacementGroupCleanerCallback"  # what it would free ends with a cluster of our own


class Trainer(TorchTrainer):
    """A ``TorchTrainer`` that starts fewer processes; ``own_cluster`` says that the cluster ends with this process."""

    def __init__(self, *args: Any, own_cluster: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._left_out = {_HANDS_OUT_DATASETS} | ({_CLEANS_UP_AFTER_THE_CONTROLLER} if own_cluster else set())

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in self._left_out]
