"""Predict the classes of images with a trained run and write them to a file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute

from raytrain.config.evaluation import TestView
from raytrain.data.labels.manifest import list_images
from raytrain.data.table_file import encode_table
from raytrain.errors import UsageError
from raytrain.inference.label_predictions import chosen_thresholds, label_columns
from raytrain.inference.trained_run import open_trained_run
from raytrain.storage.open import check_output, open_store, write_output

pc: Any = pyarrow.compute  # whose functions are made at import


@dataclass(frozen=True)
class PredictionResult:
    """What :func:`predict` wrote: a row for each of ``images`` images, of which ``errors`` could not be read."""

    run: str
    data: str
    checkpoint: str
    output: str
    images: int
    errors: int

    def summary(self) -> dict[str, Any]:
        """The result as plain values."""
        return asdict(self)


def predict(
    run: str,
    data: str,
    output: str,
    *,
    top_k: int = 1,
    threshold: Sequence[float] = (),
    test_views: Collection[TestView] = (),
    storage: str = "./runs",
    workers: int | None = None,
    address: str | None = None,
    trust: bool = False,
) -> PredictionResult:
    """Predict the class of every image below ``data`` with a run's best checkpoint, and write a row for each.

    The columns are key, label and score (name and probability of the likeliest class), label_2, score_2 and so on with
    ``top_k`` above 1, and error (why an image could not be read, else empty; its other columns are empty then). If an
    image may have several classes, the columns are key, labels (the names of its classes, separated as in the run's
    label file, or by a bar), score_NAME (the probability) for each class, and error.

    Args:
        run: the run's name.
        data: the images, in any folders or packed: a folder or ``s3://bucket/prefix``.
        output: a file (or ``s3://`` object) whose name ends in .parquet or .csv.
        top_k: number of classes for each image.
        threshold: as for :func:`raytrain.evaluate`, and so are those below.
        test_views: copies of an image over which the logits are averaged.
        storage: where the run is stored.
        workers: networks that share the work.
        address: the Ray cluster.
        trust: whether a network that is a function of the run's author may run.

    Raises:
        UsageError, StorageError: there is no such run, it is not trusted, the data cannot be read, or the file cannot
            be written.
    """
    check_output(output, (".parquet", ".csv"))
    trained = open_trained_run(run, storage, trust=trust)
    num_classes = len(trained.classes)
    if not 1 <= top_k <= num_classes:
        raise UsageError(f"--top-k is {top_k}, but run {run!r} has {num_classes} classes; use 1 to {num_classes}.")
    if trained.config.multi_label and top_k > 1:
        raise UsageError(f"--top-k is {top_k}, but images of run {run!r} may have several classes; use --threshold.")
    thresholds = chosen_thresholds(trained, threshold)
    images = open_store(data)
    manifest = list_images(images)
    table = trained.predict(
        images,
        manifest,
        workers=workers,
        address=address,
        test_views=test_views,
        top_k=top_k,
    )
    columns = label_columns(trained, table, thresholds) if trained.config.multi_label else _output_columns(table)
    write_output(output, encode_table(columns, output))
    num_errors = len(table) - table["error"].null_count
    return PredictionResult(run, images.url, trained.checkpoint, output, images=len(table), errors=num_errors)


def _output_columns(table: pa.Table) -> pa.Table:
    """The columns of the output, without predictions for images that could not be read."""
    readable = table["error"].is_null()
    predictions = table.drop_columns(["key", "error", "truth", "answer", "loss"])
    columns = {
        name: pc.if_else(readable, predictions[name], pa.nulls(len(table), predictions[name].type))
        for name in predictions.column_names
    }
    return pa.table({"key": table["key"], **columns, "error": table["error"]})
