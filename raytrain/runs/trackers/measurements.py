"""What trackers get of a run: its options and its rows of metrics, as flat dictionaries with names that all accept."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import cast

from raytrain.config import TrainConfig
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.printable import one_line

_MAX_NAME = 250  # characters, MLflow's limit
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")  # what MLflow refuses
_PREFIX = {"step": "train", "evaluation": "test"}
_COLUMNS = ("epoch", "learning_rate", "images_per_s", "data_wait_fraction", "samples_seen", "elapsed_s")
_PLACE = ("resume", "address", "track")  # options that are not the run's


def hyperparams(config: TrainConfig) -> dict[str, str | int | float]:
    """The options of a run: those with several values as text, those that are not set left out."""
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: _scalar(value) for name, value in options.items() if value not in (None, ()) and name not in _PLACE}


def row_metrics(row: MetricRow) -> dict[str, float]:
    """A row as numbers: ``train/loss`` or ``test/loss``, and the columns of a row of steps under their own names.

    A metric that was not finite when it was written, so that storage has no number for it, is NaN.
    """
    measured = {
        metric_name(f"{_PREFIX[row.kind]}/{name}"): math.nan if value is None else float(value)
        for name, value in row.metrics.items()
    }
    columns = {name: row.value(name) for name in _COLUMNS} if row.kind == "step" else {}
    return {name: float(value) for name, value in columns.items() if value is not None} | measured


def metric_name(name: str) -> str:
    """A name that every tracker accepts. Loops, and whoever wrote a stored run, may use any text."""
    parts = (part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part.strip(". "))
    return "/".join(parts)[:_MAX_NAME] or "_"


def _scalar(value: object) -> str | int | float:
    if isinstance(value, (bool, int, float)):
        return value
    return one_line(" ".join(map(str, cast(Iterable[object], value) if isinstance(value, tuple) else (value,))))
