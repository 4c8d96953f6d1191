"""Ranks training images by how wrong their labels look, as a run found while training, and writes them to correct."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset, label_columns
from raytrain.data.labels.label_file import read_label_file
from raytrain.data.labels.label_pattern import table_by_pattern
from raytrain.data.labels.part_names import Part
from raytrain.errors import UsageError
from raytrain.runs.stored_checkpoints import newest_checkpoint
from raytrain.storage.open import check_output, write_output
from raytrain.storage.store import Store
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.metrics.sample_margins import MARGINS, margins_missing

LABEL_FILE_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True, eq=False)
class RankedLabels:
    """The training images of a run, those whose labels look the most wrong first; images without a draw come last.

    The columns of ``table`` are path, label, suggested (the likeliest other class), margin, loss and draws; margin and
    loss are means over the draws. ``samples`` (num_images,) are the images as rows of the manifest.
    """

    table: pa.Table
    samples: np.ndarray[Any, np.dtype[np.int64]]


def rank_labels(config: TrainConfig, store: Store, data: Dataset) -> RankedLabels | None:
    """Rank the training images of the run in ``store`` by their mean margins (``training/metrics/sample_margins.py``).

    Return None if the run has no checkpoint, or the newest one has no margins, or those of another number of images.

    Example: ``rank_labels(config, store, data).table.slice(0, 10)``
    """
    if margins_missing(config) or (path := newest_checkpoint(store)) is None:
        return None
    state = read_checkpoint(store, path).state.get(MARGINS)
    train = data.train
    if state is None or state["sums"].shape != (3, len(train)):
        return None

    # Sort by the mean margin; images that were never drawn have none and come last.
    draws, margin_sums, loss_sums = state["sums"].double().numpy()  # (num_images,) each
    is_drawn = draws > 0
    with np.errstate(invalid="ignore"):  # 0 / 0 without a draw
        margin, loss = margin_sums / draws, loss_sums / draws
    samples = np.argsort(np.where(is_drawn, margin, np.inf), kind="stable")

    # A rival is stored as epoch * C + class. An image without a draw has none, so nothing is suggested for it.
    classes = np.array([*train.classes, ""], object)
    suggested = np.where(is_drawn, state["rivals"].numpy() % len(train.classes), len(train.classes))
    missing = ~is_drawn[samples]
    columns = {
        "path": train.keys.take(pa.array(samples)),
        "label": pa.array(classes[train.labels[samples]], pa.string()),
        "suggested": pa.array(classes[suggested[samples]], pa.string()),
        "margin": pa.array(margin[samples].round(4), mask=missing),
        "loss": pa.array(loss[samples].round(4), mask=missing),
        "draws": pa.array(draws[samples].astype(np.int64)),
    }
    return RankedLabels(pa.table(columns), samples)


def write_labels(ranked: RankedLabels, data: Dataset, output: str, config: TrainConfig) -> dict[str, str]:
    """Write label files that a person can correct; return their names by the option that takes each (``--labels``).

    The first file has the training images, the most suspicious first. If validation or test images are in the same
    folder, they follow, and a column ``split`` says which images belong to which part. Parts in other folders have a
    file each beside it. Paths, labels and groups are in the columns that ``config`` names, so that the run's options
    can read the files.

    Raises UsageError if ``output`` has the wrong suffix or no folder.
    """
    check_output(output, LABEL_FILE_SUFFIXES, "--write-labels")
    by_url: dict[str, list[Part]] = {}
    for part, (store, _, _) in data.parts.items():
        by_url.setdefault(store.url, []).append(part)

    written: dict[str, str] = {}
    for parts in by_url.values():
        tables: list[pa.Table] = []
        for part in parts:
            # The images of a part, with their labels; for the training images, the most suspicious first.
            images = data.parts[part][1]
            table = ranked.table
            if part != "train":
                classes = np.array(images.classes, object)
                table = pa.table({"path": images.keys, "label": pa.array(classes[images.labels], pa.string())})
            if config.group_by is not None:
                keys, groups = images.keys.to_pylist(), _groups_of(config, part, data)
                group_of = dict(zip(keys, groups, strict=True))
                column = pa.array([group_of[path] for path in table["path"].to_pylist()], pa.string())
                table = table.add_column(2, config.group_by, column)

            # Name the columns as the run's options do.
            if len(parts) > 1:
                table = table.add_column(2, "split", pa.array([part] * len(table)))
            names = {"path": config.key_column or "path", "label": next(iter(config.label_column), "label")}
            tables.append(table.rename_columns([names.get(name, name) for name in table.column_names]))

        # The file with the training images is called ``output``, another one by the first part that is in it.
        first = parts[0]
        stem, dot, suffix = output.rpartition(".")
        name = output if first == "train" else f"{stem}-{first}{dot}{suffix}"
        write_output(name, _encode(pa.concat_tables(tables, promote_options="default"), name))
        written["--labels" if first == "train" else f"--{first}-labels"] = name
    return written


def check_can_rank(config: TrainConfig, ranked: RankedLabels | None) -> RankedLabels:
    """Return ``ranked``; if it is None, raise UsageError, whose sentence says why the labels are not ranked."""
    if ranked is not None:
        return ranked
    if not (config.resume and config.name):
        raise UsageError("--write-labels takes the labels of a run: give its --name, and --resume.")
    reason = margins_missing(config) or (
        "it has no checkpoint yet, or its loop gives logits neither to run.loss nor to run.accuracy nor to run.show"
    )
    raise UsageError(f"The labels of run {config.name!r} are not ranked: {reason}.")


def _groups_of(config: TrainConfig, part: Part, data: Dataset) -> list[str]:
    """Return the group of each image of a part, by the label file or the pattern; "" for images that have none."""
    # The label file of the part, or else that of all images.
    store, images, _ = data.parts[part]
    columns = label_columns(config)
    file = {"train": None, "validation": config.validation_labels, "test": config.test_labels}[part] or config.labels
    if config.label_pattern is not None:
        table = table_by_pattern(store, config.label_pattern, columns, config.max_bad_fraction)
    else:
        assert file is not None  # --group-by is refused without one
        table = read_label_file(file, columns, [store.url])
    rows = table.rows_of(images)
    return np.where(rows < 0, "", table.groups[rows]).tolist()


def _encode(table: pa.Table, name: str) -> bytes:
    """Return the content of a label file in the format of the suffix of ``name``.

    Texts are not escaped, not even those that a spreadsheet takes for formulas, because raytrain reads the file again.
    """
    sink = io.BytesIO()
    if name.endswith(".csv"):
        pyarrow.csv.write_csv(table, sink)
    else:
        pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()
