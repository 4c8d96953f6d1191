"""Training images ranked by how wrong their labels look, as a run has found while it trained, and a label file to
correct.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError
from raytrain.runs.checkpoint_files import newest_checkpoint
from raytrain.storage.open import check_output, write_output
from raytrain.storage.store import Store
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.sample_margins import MARGINS, margins_missing

LABEL_FILE_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True, eq=False)
class RankedLabels:
    """The training images of a run, the one whose label looks the most wrong first; those without a draw come last.

    The columns of ``table`` are path, label, suggested (the likeliest other class), margin, loss and draws; margin and
    loss are means over the draws. ``samples`` are the numbers of the images.
    """

    table: pa.Table
    samples: np.ndarray[Any, np.dtype[np.int64]]


def rank_labels(config: TrainConfig, store: Store, data: Dataset) -> RankedLabels | None:
    """Rank the training images of the run in ``store`` by their margins; None if its newest checkpoint has none.

    Example::

        rank_labels(config, store, data).table.slice(0, 10)
    """
    if margins_missing(config) or (path := newest_checkpoint(store)) is None:
        return None
    state = read_checkpoint(store, path).state.get(MARGINS)
    train = data.train
    if state is None or state["sums"].shape != (3, len(train)):
        return None

    # Images that were never drawn have no margin: they come last.
    draws, margins, losses = state["sums"].double().numpy()
    is_drawn = draws > 0
    with np.errstate(invalid="ignore"):
        margin, loss = margins / draws, losses / draws
    samples = np.argsort(np.where(is_drawn, margin, np.inf), kind="stable")
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


def write_labels(ranked: RankedLabels, data: Dataset, output: str) -> dict[str, str]:
    """Write label files to correct, and return them by the option that takes each, such as ``--labels``.

    The first one has the training images, the most suspicious first, and what else is below ``--data``, with a column
    ``split`` that keeps it where it was. Held-out images of other folders have a file each beside it.
    """
    check_output(output, LABEL_FILE_SUFFIXES, "--write-labels")
    by_url: dict[str, list[tuple[str, Manifest]]] = {}
    for part, (store, images, _) in data.parts.items():
        by_url.setdefault(store.url, []).append((part, images))

    written: dict[str, str] = {}
    for parts in by_url.values():
        tables = [ranked.table if part == "train" else _labels_of(images) for part, images in parts]
        if len(parts) > 1:
            splits = zip(tables, parts, strict=True)
            tables = [table.add_column(2, "split", pa.array([part] * len(table))) for table, (part, _) in splits]
        first = parts[0][0]
        stem, dot, suffix = output.rpartition(".")
        name = output if first == "train" else f"{stem}-{first}{dot}{suffix}"
        write_output(name, _encode(pa.concat_tables(tables, promote_options="default"), name))
        written["--labels" if first == "train" else f"--{first}-labels"] = name
    return written


def check_can_rank(config: TrainConfig, ranked: RankedLabels | None) -> RankedLabels:
    """Return ``ranked``; raise UsageError that says why, if a run's labels are not ranked."""
    if ranked is not None:
        return ranked
    if not (config.resume and config.name):
        raise UsageError("--write-labels takes the labels of a run: give its --name, and --resume.")
    reason = margins_missing(config) or (
        "it has no checkpoint yet, or its loop gives logits neither to run.loss nor to run.accuracy nor to run.show"
    )
    raise UsageError(f"The labels of run {config.name!r} are not ranked: {reason}.")


def _labels_of(images: Manifest) -> pa.Table:
    """Return the columns path and label of ``images``."""
    classes = np.array(images.classes, object)
    return pa.table({"path": images.keys, "label": pa.array(classes[images.labels], pa.string())})


def _encode(table: pa.Table, name: str) -> bytes:
    """Return a label file. Its texts stay as they are, also those that a spreadsheet would take for formulas: it is to
    be read again.
    """
    sink = io.BytesIO()
    if name.endswith(".csv"):
        pyarrow.csv.write_csv(table, sink)
    else:
        pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()
