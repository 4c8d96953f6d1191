"""Train image classifiers on all your GPUs with your own loop, straight from S3."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytrain import recipes
from raytrain.backends.train import TrainResult, stop, train
from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError, StorageError, TrainingFailed, UsageError

if TYPE_CHECKING:
    from raytrain.backends.handle import RunHandle
    from raytrain.diagnostics.audit import audit
    from raytrain.display.notebook import start
    from raytrain.experiments.compare import compare
    from raytrain.experiments.study import StudyResult, study
    from raytrain.experiments.sweep.results import SweepResult
    from raytrain.experiments.sweep.sweep import sweep
    from raytrain.inference.classifier import Classifier, load
    from raytrain.inference.evaluate import evaluate
    from raytrain.inference.export import export
    from raytrain.inference.predict import predict
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
    "Classifier": "raytrain.inference.classifier",
    "Run": "raytrain.training.run",
    "RunHandle": "raytrain.backends.handle",
    "StudyResult": "raytrain.experiments.study",
    "SweepResult": "raytrain.experiments.sweep.results",
    "audit": "raytrain.diagnostics.audit",
    "compare": "raytrain.experiments.compare",
    "evaluate": "raytrain.inference.evaluate",
    "export": "raytrain.inference.export",
    "load": "raytrain.inference.classifier",
    "predict": "raytrain.inference.predict",
    "start": "raytrain.display.notebook",
    "study": "raytrain.experiments.study",
    "sweep": "raytrain.experiments.sweep.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
