"""Predict the classes of images with a trained run and write them to a file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute

from raytrain.config.evaluation import TestView
from raytrain.config.option_values import Location
from raytrain.data.blocks import number_array
from raytrain.data.labels.listing import SUFFIXES, lost_files
from raytrain.data.labels.manifest import Manifest, list_images, named_images
from raytrain.data.table_file import encode_table
from raytrain.errors import StorageError, UsageError, format_count
from raytrain.inference.classification_metrics import chosen_thresholds, predicted_labels
from raytrain.inference.trained_run import open_trained_run
from raytrain.storage.open import absolute_path, check_output, open_store, write_output
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import temporary_folder

pc: Any = pyarrow.compute  # makes its functions when it is imported, so pyright knows none of them

_SCHEME_AND_BUCKET = len(["s3:", "", "bucket"])  # the number of parts of a URL that all images must share


@dataclass(frozen=True)
class PredictionResult:
    """The rows of :func:`predict`, one for each of ``images`` images, of which ``errors`` could not be read."""

    run: str
    data: str
    checkpoint: str
    output: str | None
    images: int
    errors: int
    left_out: str | None
    """The numbers of other files in the folder by the reason why they are not used, as text; None without any."""
    table: pa.Table = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values, with the rows if they were not written to a file."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "table"}
        return values if self.output else {**values, "rows": self.table.to_pylist()}


def predict(
    run: str,
    data: Location | Iterable[Location],
    output: Location | None = None,
    *,
    top_k: int = 1,
    threshold: float | Sequence[float] = (),
    test_views: Collection[TestView] = (),
    embeddings: bool = False,
    storage: Location = "./runs",
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
        data: the images, in any folders or packed: a folder or ``s3://bucket/prefix``; or an image file or a list of
            them, whose keys are their paths below the folder that they have in common.
        output: a file (or ``s3://`` object) whose name ends in .parquet or .csv; by default nothing is written, and
            the rows are the ``table`` of the result.
        top_k: number of classes for each image.
        threshold: the probability from which on an image has a class, if it may have several: one for all classes or
            one for each; by default those with the best F1 on the run's own validation images.
        test_views: copies of an image over which the logits are averaged: mirrored (``flip``), shifted (``shift``).
        embeddings: add a column ``embedding``: what the body of the network gives to its head, a list of as many
            float32 for each image, such as 512 for resnet18. ``output``, if given, must be a .parquet file.
        storage: where the run is stored.
        workers: networks that share the work; by default one per GPU, or as many as a cluster has room for.
        address: the Ray cluster; by default as for :func:`raytrain.evaluate`.
        trust: whether a network that is a function of the run's author may run.

    Raises:
        UsageError, StorageError: there is no such run, it has no checkpoint, it is not trusted, an argument does not
            fit it, the data cannot be read, or the file cannot be written.

    Example::

        for row in raytrain.predict("first", "photos").table.to_pylist():
            print(row["key"], row["label"], row["score"])
    """
    # Everything that can be refused is refused before an image is read.
    if output is not None:
        output = os.fspath(output)
        check_output(output, (".parquet", ".csv"))
        if embeddings and output.endswith(".csv"):
            raise UsageError(f"--embeddings are lists of numbers, and --output {output} holds none; write .parquet.")
    trained = open_trained_run(run, os.fspath(storage), trust=trust)
    num_classes = len(trained.classes)
    if not 1 <= top_k <= num_classes:
        raise UsageError(
            f"--top-k is {top_k}, but run {run!r} has {format_count(num_classes, 'class')}; use 1 to {num_classes}."
        )
    if trained.config.multi_label and top_k > 1:
        raise UsageError(f"--top-k is {top_k}, but images of run {run!r} may have several classes; use --threshold.")
    thresholds = chosen_thresholds(trained, threshold)

    # Predict all images, in this process or on a cluster.
    images, manifest = _open_images(data)
    options: dict[str, Any] = {"test_views": test_views, "top_k": top_k, "embeddings": embeddings}
    table = trained.predict(images, manifest, workers=workers, address=address, **options)
    if trained.config.multi_label:
        predictions = predicted_labels(trained, table, thresholds)
        if embeddings:
            predictions = predictions.append_column("embedding", table["embedding"])
    else:
        predictions = table.drop_columns(["key", "error", "truth", "answer", "loss"])
    if embeddings:  # pyarrow before 26 cannot read lists of a fixed length from Parquet if some are null
        index = predictions.column_names.index("embedding")
        lists = predictions["embedding"].cast(pa.large_list(pa.float32()))
        predictions = predictions.set_column(index, "embedding", lists)

    # A row for each image, in the manifest's order. An image that could not be read has its error alone: for null in
    # place of a row's number, Arrow takes a row of nulls.
    is_readable = table["error"].is_null()
    row_numbers = pc.if_else(is_readable, number_array(np.arange(len(table))), pa.nulls(len(table), pa.int64()))
    predictions = predictions.take(row_numbers)
    rows = predictions.add_column(0, "key", table["key"]).append_column("error", table["error"])
    if output is not None:
        _write_rows(output, encode_table(rows, output))
    num_errors = len(table) - table["error"].null_count
    left_out = lost_files(manifest.left_out) or None
    return PredictionResult(run, images.url, trained.checkpoint, output, len(table), num_errors, left_out, rows)


def _write_rows(output: str, content: bytes) -> None:
    """Write the encoded rows into ``output``. If that fails, keep them in a temporary file, which the error names.

    That a bucket refuses the file or that the disk is full is seen only now, perhaps after hours of predicting.
    """
    try:
        write_output(output, content)
    except StorageError as error:
        kept = os.path.join(temporary_folder(), f"predictions-{uuid4().hex[:8]}{os.path.splitext(output)[1]}")
        try:
            write_output(kept, content)
        except StorageError:  # there is no room for it either
            raise error from None
        raise StorageError(f"{str(error).rstrip('.')}; the rows are in {kept}, copy them from there.") from error


def _open_images(data: Location | Iterable[Location]) -> tuple[Store, Manifest]:
    """Return the images below a folder or URL, or the files that are named, and the store that has them.

    Raises UsageError if no image is named, if there is a folder among several files, or if files in a bucket are named
    with others that are not in it.
    """
    # One folder or URL: all images below it.
    is_single = isinstance(data, (str, os.PathLike))
    files = [os.fspath(data)] if is_single else [os.fspath(file) for file in data]
    if is_single and (os.path.isdir(files[0]) or not files[0].lower().endswith(SUFFIXES)):
        images = open_store(files[0])
        return images, list_images(images)

    # Image files: their keys are the paths below the folder that they share, which the store is opened at.
    if not files:
        raise UsageError("No image is named; give a folder, a URL, or image files.")
    if folder := next((file for file in files if os.path.isdir(file)), None):
        raise UsageError(
            f"{folder} is a folder, and image files are expected; give it alone, as --data {shlex.quote(folder)}."
        )

    # Folders of the paths are compared level by level, from the root on, as far as they are the same.
    paths = [file if "://" in file else absolute_path(file) for file in files]
    levels = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]
    if any("://" in path for path in paths) and len(shared) < _SCHEME_AND_BUCKET:
        raise UsageError("The image files are not all in one bucket; predict those of each bucket by themselves.")
    images = open_store("/".join(shared) or "/")
    return images, named_images(images, ["/".join(path.split("/")[len(shared) :]) for path in paths])
