"""Evaluate a trained run on labelled images."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.config.evaluation import TestView
from raytrain.data.blocks import numbers
from raytrain.data.dataset import label_columns
from raytrain.data.labels.label_file import read_label_file
from raytrain.data.labels.labelled_images import evaluated_images
from raytrain.data.labels.manifest import Manifest, build_manifest
from raytrain.errors import UsageError
from raytrain.inference.classification_metrics import Scores, score
from raytrain.inference.label_predictions import LabelEvaluation, chosen_thresholds, score_labels
from raytrain.inference.trained_run import TrainedRun, open_trained_run
from raytrain.storage.open import open_store
from raytrain.storage.store import Store


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
    labels: str | None = None,
    threshold: Sequence[float] = (),
    test_views: Collection[TestView] = (),
    storage: str = "./runs",
    workers: int | None = None,
    address: str | None = None,
    trust: bool = False,
) -> EvaluationResult | LabelEvaluation:
    """Measure a run's best checkpoint on labelled images, each used exactly once.

    Args:
        run: the run's name.
        data: the images, in class folders or packed: a folder or ``s3://bucket/prefix``.
        labels: a label file for the images, with the same columns as the run's; by default their folders are the
            labels. If it has a column ``split``, its test images are used. A run whose images may have several
            classes needs it.
        threshold: if an image may have several classes: the probability from which on it has a class, one for all
            classes or one for each; by default those with the best F1 on the run's own test images.
        test_views: copies of an image over which the logits are averaged: mirrored (``flip``), shifted by a pixel
            (``shift``). Those that the run was trained with are always used.
        storage: where the run is stored.
        workers: networks that share the work; by default one per GPU, or as many as a cluster has room for.
        address: the Ray cluster; by default RAY_ADDRESS, else one that runs on this machine, else none: this process
            does the work without Ray. ``local`` starts a cluster for it.
        trust: whether a network that is a function of the run's author may run.

    Raises:
        UsageError, StorageError: there is no such run, it is not trusted, or the data cannot be read or has other
            classes.
    """
    trained = open_trained_run(run, storage, trust=trust)
    thresholds = chosen_thresholds(trained, threshold)
    images = open_store(data)
    manifest = _labelled(trained, images, labels)
    table = trained.predict(images, manifest, workers=workers, address=address, test_views=test_views)
    if trained.config.multi_label:
        return score_labels(trained, manifest, table, thresholds)
    readable = table.filter(table["error"].is_null())
    truth, answers, losses = (numbers(readable[name]) for name in ("truth", "answer", "loss"))
    return EvaluationResult(
        run=run,
        data=images.url,
        checkpoint=trained.checkpoint,
        skipped=len(table) - len(readable),
        **vars(score(truth, answers, losses, trained.classes)),
    )


def _labelled(trained: TrainedRun, images: Store, labels: str | None) -> Manifest:
    if labels is None and trained.config.multi_label:
        raise UsageError(
            f"Images of run {trained.name!r} may have several classes; give their label file with --labels."
        )
    if labels is None:
        return build_manifest(images, trained.classes, part="test")
    table = read_label_file(labels, label_columns(trained.config), [images.url])
    return evaluated_images(images, table, trained.classes, trained.config.max_bad_fraction)
