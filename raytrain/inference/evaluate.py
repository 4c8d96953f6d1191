"""Evaluate a trained run on labelled images, on all workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain.data.manifest import build_manifest
from raytrain.inference.classification_metrics import Scores, score
from raytrain.inference.trained_run import open_trained_run
from raytrain.storage.open import open_store


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult(Scores):
    """The metrics of a run's best checkpoint. ``skipped`` images could not be read and are not in the metrics."""

    run: str
    data: str
    checkpoint: str
    skipped: int

    def summary(self) -> dict[str, Any]:
        """The result as plain values; what ``raytrain evaluate --json`` prints."""
        about = {name: getattr(self, name) for name in ("run", "data", "checkpoint", "skipped")}
        return {**about, **super().summary()}


def evaluate(
    run: str,
    data: str,
    *,
    storage: str = "./runs",
    workers: int | None = None,
    address: str | None = None,
    trust: bool = False,
) -> EvaluationResult:
    """Measure a run's best checkpoint on labelled images, each used exactly once.

    Args:
        run: the run's name.
        data: the images, in class folders or packed: a folder or ``s3://bucket/prefix``.
        storage: where the run is stored.
        workers: processes that share the work; by default as many as fit.
        address: the Ray cluster; by default RAY_ADDRESS, else one on this machine.
        trust: whether a network that is a function of the run's author may run.

    Raises:
        UsageError, StorageError: there is no such run, it is not trusted, or the data cannot be read or has other
            classes.
    """
    trained = open_trained_run(run, storage, trust=trust)
    images = open_store(data)
    manifest = build_manifest(images, classes=trained.classes)
    table = trained.predict(images, manifest, workers=workers, address=address)
    readable = table.filter(table["error"].is_null())
    truth, answers, losses = (readable[name].to_numpy() for name in ("truth", "answer", "loss"))
    return EvaluationResult(
        run=run,
        data=images.url,
        checkpoint=trained.checkpoint,
        skipped=len(table) - len(readable),
        **vars(score(truth, answers, losses, trained.classes)),
    )
