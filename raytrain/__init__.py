"""Train image classifiers on all your GPUs with your own loop, straight from S3."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytrain import recipes
from raytrain.config import TrainConfig
from raytrain.driver import TrainResult, stop, train
from raytrain.errors import RaytrainError, StorageError, TrainingFailed, UsageError

if TYPE_CHECKING:
    from raytrain.auditing import audit
    from raytrain.classifier import Classifier, load
    from raytrain.comparison import compare
    from raytrain.exporting import export
    from raytrain.handle import RunHandle, start
    from raytrain.inference import evaluate, predict
    from raytrain.studying import StudyResult, study
    from raytrain.sweeping.driver import sweep
    from raytrain.sweeping.results import SweepResult
    from raytrain.training.batch import Batch
    from raytrain.training.run import Run

__all__ = [
    "Batch",
    "Classifier",
    "RaytrainError",
    "Run",
    "RunHandle",
    "StorageError",
    "StudyResult",
    "SweepResult",
    "TrainConfig",
    "TrainResult",
    "TrainingFailed",
    "UsageError",
    "audit",
    "compare",
    "evaluate",
    "export",
    "load",
    "predict",
    "recipes",
    "start",
    "stop",
    "study",
    "sweep",
    "train",
]

# Imported when they are first used: torch takes seconds, and the command line must start at once.
_LATER = {
    "Batch": "raytrain.training.batch",
    "Classifier": "raytrain.classifier",
    "Run": "raytrain.training.run",
    "RunHandle": "raytrain.handle",
    "StudyResult": "raytrain.studying",
    "SweepResult": "raytrain.sweeping.results",
    "audit": "raytrain.auditing",
    "compare": "raytrain.comparison",
    "evaluate": "raytrain.inference",
    "export": "raytrain.exporting",
    "load": "raytrain.classifier",
    "predict": "raytrain.inference",
    "start": "raytrain.handle",
    "study": "raytrain.studying",
    "sweep": "raytrain.sweeping.driver",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
