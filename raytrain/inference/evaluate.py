"""Evaluate a trained run on labelled images."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.config.evaluation import TestView
from raytrain.config.option_values import Location
from raytrain.data.blocks import numbers
from raytrain.data.dataset import label_columns
from raytrain.data.duplicates import StoredImages, find_duplicates
from raytrain.data.labels.label_file import read_label_file
from raytrain.data.labels.label_pattern import groups_in_names, table_by_pattern
from raytrain.data.labels.labelled_images import images_of_part
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import Part
from raytrain.errors import StorageError, UsageError
from raytrain.inference.classification_metrics import (
    EvaluationResult,
    LabelEvaluation,
    chosen_thresholds,
    grouped_interval,
    probabilities_of,
    score,
    score_labels,
    wilson_interval,
)
from raytrain.inference.trained_run import TrainedRun, open_trained_run
from raytrain.runs.documents import MANIFEST, TEST_MANIFEST, VALIDATION_MANIFEST
from raytrain.storage.open import open_store
from raytrain.storage.store import Store

_log = logging.getLogger("raytrain")
_COMPARE_S = 10.0  # for how long images are compared with training images
_ROWS_AT_A_TIME = 1024


def evaluate(
    run: str,
    data: Location | None = None,
    *,
    labels: Location | None = None,
    threshold: float | Sequence[float] = (),
    test_views: Collection[TestView] = (),
    storage: Location = "./runs",
    workers: int | None = None,
    address: str | None = None,
    trust: bool = False,
) -> EvaluationResult | LabelEvaluation:
    """Measure a run's best checkpoint on labelled images, each used exactly once.

    Returns an :class:`EvaluationResult`, or, if the images of the run may have several classes, a
    :class:`LabelEvaluation`.

    Args:
        run: the run's name.
        data: the images, in class folders or packed: a folder or ``s3://bucket/prefix``. By default the run's own test
            images, or, if it has none, its validation images.
        labels: a label file for the images, with the same columns as the run's; by default ``metadata.csv`` or the like
            beside them, or else their folders. If it has a column ``split``, its test images are used, or, without
            any, its validation images. A run whose images may have several classes needs it.
        threshold: if an image may have several classes: the probability from which on it has a class, one for all
            classes or one for each; by default those with the best F1 on the run's own validation images.
        test_views: copies of an image over which the logits are averaged: mirrored (``flip``), shifted by a pixel
            (``shift``). Those that the run was trained with are always used.
        storage: where the run is stored.
        workers: networks that share the work; by default one per GPU, or as many as a cluster has room for.
        address: the Ray cluster; by default RAY_ADDRESS, else for more than a few images one that you started on this
            machine, else none: this process does the work without Ray. ``local`` starts a cluster for it.
        trust: whether a network that is a function of the run's author may run.

    Raises:
        UsageError, StorageError: there is no such run, it has no checkpoint, it is not trusted, or the data cannot be
            read or has other classes.

    Example::

        result = raytrain.evaluate("first", "photos")
        print(result.accuracy)
    """
    # Everything that can be refused is refused before an image is read.
    trained = open_trained_run(run, os.fspath(storage), trust=trust)
    thresholds = chosen_thresholds(trained, threshold)
    part: Part | None = None
    if data is None:
        part, images, manifest = _own_images(trained, labels)
    else:
        images = open_store(os.fspath(data))
        manifest = _labelled_images(trained, images, labels)

    # Images are predicted in the run's precision, so that the metrics agree with those that the run itself measured.
    table = trained.predict(images, manifest, workers=workers, address=address, test_views=test_views, as_measured=True)
    if trained.config.multi_label:
        result = score_labels(trained, manifest, table, thresholds)
    else:
        result = _score_with_interval(trained, images.url, manifest, table, labels)
    readable = table.filter(table["error"].is_null())
    result = replace(result, part=part, metrics=_named_metrics(trained, manifest, readable))

    # Images of the user's own may be among those that the run was trained on; its own held-out images are not.
    return result if data is None else replace(result, **_count_training_images(trained, images, manifest))


def _score_with_interval(
    trained: TrainedRun, data: str, manifest: Manifest, table: pa.Table, labels: Location | None
) -> EvaluationResult:
    """Return the metrics of the predictions in ``table`` of images of one class each, which ``manifest`` lists.

    The interval of the accuracy is computed from groups of images that belong together, if they are known, or else from
    single images. ``data`` is the place of the images, and ``labels`` their label file, if the user gave one.
    """
    is_readable = table["error"].is_null()
    readable = table.filter(is_readable)
    truth, answers, losses = (numbers(readable[name]) for name in ("truth", "answer", "loss"))
    result = score(
        truth,
        answers,
        losses,
        trained.classes,
        run=trained.name,
        data=data,
        checkpoint=trained.checkpoint,
        skipped=len(table) - len(readable),
    )
    if not len(truth):
        return result

    groups = _groups(trained, manifest, labels)
    if groups is not None:
        groups = groups[np.array(is_readable.to_pylist(), bool)]  # to_numpy would import pandas
        interval, num_groups = grouped_interval(truth == answers, groups), len(set(groups.tolist()))
        return replace(result, accuracy_interval=interval, interval_groups=num_groups)
    if trained.config.group_by is not None:
        _log.warning(
            "The groups of --group-by %s are not known for these images: the interval is that of single ones.",
            trained.config.group_by,
        )
    return replace(result, accuracy_interval=wilson_interval(int((truth == answers).sum()), len(truth)))


def _groups(trained: TrainedRun, manifest: Manifest, labels: Location | None) -> npt.NDArray[np.object_] | None:
    """Return the name of each image's group, (n,), one for each image of ``manifest``.

    The run's label pattern gives the groups, or else a label file that has all of these images: the file ``labels``,
    or, without it, one of the run's own. Return None if neither has them, or if the run has no --group-by.
    """
    config = trained.config
    if config.group_by is None:
        return None
    if config.label_pattern is not None and labels is None:
        return groups_in_names(manifest.keys.to_pylist(), config.label_pattern, config.group_by)
    for file in filter(None, [labels] if labels else [config.labels, config.validation_labels, config.test_labels]):
        with suppress(StorageError, UsageError):  # the file is gone, or lacks the column
            table = read_label_file(os.fspath(file), label_columns(config), [manifest.url])
            rows = table.rows_of(manifest)
            if (rows >= 0).all():
                return table.groups[rows]
    return None


def _named_metrics(trained: TrainedRun, manifest: Manifest, table: pa.Table) -> dict[str, float | None]:
    """Return the metrics that the run's options name, for the predictions in ``table`` of images of ``manifest``.

    A metric that cannot be computed, such as one without images, is None.
    """
    config = trained.config
    if not config.named_metrics:
        return {}
    import torch

    from raytrain.training.metrics.named_metrics import NamedMetrics

    metrics = NamedMetrics(
        config.named_metrics, trained.classes, multi_label=config.multi_label, device=torch.device("cpu")
    )
    scores, truth = probabilities_of(table), numbers(table["truth"])
    if manifest.label_sets is not None:
        truth = manifest.label_sets[truth].astype(np.int64)  # (n, num_classes), 0 or 1
    for start in range(0, len(scores), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        metrics.add(torch.from_numpy(scores[rows].copy()), torch.from_numpy(truth[rows].copy()))
    # There is one process, so sums are their own totals, and rows need not be gathered.
    measured = metrics.values(torch.Tensor.tolist, lambda rows: rows, world_size=1)
    return {name: None if math.isnan(value) else value for name, value in measured.items()}


def _own_images(trained: TrainedRun, labels: Location | None) -> tuple[Part, Store, Manifest]:
    """Return which of the run's own images to measure, the store that has them, and the list of them.

    They are its test images, or, if it has none, its validation images.

    Raises UsageError if the run has stored no list of either, or if the user gave ``labels``, and StorageError if
    their folder cannot be read.
    """
    if labels is not None:
        raise UsageError("--labels is for other images than the run's own; give those with --data.")
    documents: dict[Part, str] = {"test": TEST_MANIFEST, "validation": VALIDATION_MANIFEST}
    for part, document in documents.items():
        with suppress(FileNotFoundError):
            manifest = Manifest.from_parquet(trained.store.get(document))
            images = open_store(manifest.url)
            if images.cloud is None:  # in a folder that is gone, each image would count as one that cannot be decoded
                images.check_readable()
            return part, images, manifest
    raise UsageError(f"Run {trained.name!r} has no list of the images that it held out; give images with --data.")


def _labelled_images(trained: TrainedRun, images: Store, labels: Location | None) -> Manifest:
    """List the images that the user gave, with their labels.

    These are from the label file ``labels``, or else by the run's label pattern, or else from what
    :func:`images_of_part` finds beside the images. Raises UsageError if the run lacks one of the images' classes, or if
    its images may have several classes and nothing gives their labels.
    """
    pattern = trained.config.label_pattern
    if labels is None and pattern is None and trained.config.multi_label:
        raise UsageError(
            f"Images of run {trained.name!r} may have several classes; give their label file with --labels."
        )
    columns = label_columns(trained.config)
    bad_fraction = trained.config.max_bad_fraction
    table = None if labels is None else read_label_file(os.fspath(labels), columns, [images.url])
    if table is None and pattern is not None:
        table = table_by_pattern(images, pattern, columns, bad_fraction)
    return images_of_part(images, table, "test", bad_fraction, trained.classes)


def _count_training_images(trained: TrainedRun, images: Store, manifest: Manifest) -> dict[str, Any]:
    """Count the images that are training images of the run: in the same place, or elsewhere with the same content.

    Returns ``trained_on`` and ``all_compared``, the fields of :class:`EvaluatedRun`.
    """
    try:
        training = Manifest.from_parquet(trained.store.get(MANIFEST))
    except (FileNotFoundError, StorageError):
        return {"trained_on": None}

    # Images in the same folder or bucket are compared by their keys, and no file is read.
    training_keys = set(training.keys.to_pylist()) if training.url == manifest.url else set[str]()
    is_same_place = np.array([key in training_keys for key in manifest.keys.to_pylist()], bool)

    # Other images are compared by their content. Only images with the size of a training image in bytes are read, and
    # only those training images.
    candidates = _with_sizes_of(training, manifest.select(np.flatnonzero(~is_same_place)))
    num_same_content, is_complete = 0, True
    if len(candidates):
        try:
            originals = StoredImages(open_store(trained.config.data), _with_sizes_of(candidates, training))
            duplicates = find_duplicates([originals, StoredImages(images, candidates)], time.monotonic() + _COMPARE_S)
            num_same_content, is_complete = len(duplicates.held_out), duplicates.compared == duplicates.images
        except (StorageError, UsageError):  # the training images are gone, or this user may not read them
            is_complete = False
    return {"trained_on": int(is_same_place.sum()) + num_same_content, "all_compared": is_complete}


def _with_sizes_of(originals: Manifest, images: Manifest) -> Manifest:
    """Return the ``images`` that may be copies of one of the ``originals``: their files have as many bytes."""
    return images.select(np.flatnonzero(np.isin(images.sizes_bytes, originals.sizes_bytes)))
