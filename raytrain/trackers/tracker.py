"""The interface of a tracker, and options and rows as flat dictionaries."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import as_tuple
from raytrain.runs.redact import one_line
from raytrain.storage.store import Store

TrackerStatus = Literal["success", "failed"]
_MAX_NAME = 250  # characters, MLflow's limit
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")  # what MLflow refuses
_PREFIX = {"step": "train", "evaluation": "validation", "test": "test"}
_COLUMNS = ("epoch", "learning_rate", "images_per_s", "data_wait_fraction", "samples_seen", "elapsed_s")


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of a run, from one thread. If a tracker raises an exception, or is slow, the run goes on.

    A tracker may have more methods, which are called if they exist:

    - ``save()`` after each group of calls of ``log_metrics``, to send or flush the rows;
    - ``log_image(key, images, step, caption)``, as Lightning's, after an evaluation: a list of images, each of uint8,
      (H, W, 3), and a list of their captions, which may have two lines;
    - ``stop_requested()`` every ten seconds: if it returns True, the run stops with a checkpoint;
    - ``log_network(file)`` at the end, with the path of the run's last checkpoint.

    Example::

        class Printer:
            def log_hyperparams(self, params): print(params)
            def log_metrics(self, metrics, step): print(step, metrics)
            def finalize(self, status): print(status)

        raytrain.train(config, trackers=[Printer()])
    """

    def log_hyperparams(self, params: dict[str, str | int | float]) -> None:
        """Take the options of the run, in a flat dictionary. Called once in each attempt."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Take numbers by name, after ``step`` completed steps. A number may be NaN or infinite."""

    def finalize(self, status: TrackerStatus) -> None:
        """End the run: ``success`` if it finished or was stopped, otherwise ``failed``. It may resume later."""


@dataclass(frozen=True)
class TrackedSweep:
    """The name and the storage of a sweep, whose trials trackers show together."""

    name: str
    store: Store


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for: its name, its storage, and the tracker's ``id`` of an earlier attempt.

    ``sweep`` is the sweep that the run is a trial of, if any.
    """

    name: str
    store: Store
    id: str | None = None
    sweep: TrackedSweep | None = None


def hyperparams(config: TrainConfig) -> dict[str, str | int | float]:
    """Return the options of a run by name, each as a number or a text of one line.

    Options that are not set are left out, as are options of the command, such as ``--resume``: they say nothing about
    the run. Several values are joined by spaces.

    Example: ``hyperparams(config)["image_size"] == "224 224"``
    """
    options_of_command = options_with(Mark.OF_COMMAND)
    params: dict[str, str | int | float] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value in (None, ()) or field.name in options_of_command:
            continue
        is_number = isinstance(value, (bool, int, float))
        params[field.name] = value if is_number else one_line(" ".join(map(str, as_tuple(value))))
    return params


def row_metrics(row: MetricRow) -> dict[str, float]:
    """Return the numbers of a row by name, such as ``train/loss``; NaN for a metric that the row stores as None.

    A row of a step also has its ``epoch``, ``learning_rate``, speed and times, as far as they are known.
    """
    measured = {
        metric_name(f"{_PREFIX[row.kind]}/{name}"): math.nan if value is None else float(value)
        for name, value in row.metrics.items()
    }
    columns = {name: row.value(name) for name in _COLUMNS} if row.kind == "step" else {}
    return {name: float(value) for name, value in columns.items() if value is not None} | measured


def metric_name(name: str) -> str:
    """Return ``name``, which may be any text, in a form that every tracker accepts.

    Example: ``metric_name("validation/top5 (%)") == "validation/top5 ___"``
    """
    parts = (part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part.strip(". "))
    return "/".join(parts)[:_MAX_NAME].rstrip("/. ") or "_"  # a cut name may end with a separator, which is refused
