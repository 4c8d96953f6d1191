"""Compares runs: the options in which they differ, how far and how well each trained, and the order of their list."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.option_values import Location
from raytrain.config.options import options_with
from raytrain.errors import RaytrainError, UsageError, shell_command
from raytrain.experiments.best_metric import best_metric_of
from raytrain.experiments.scaling import images_per_s
from raytrain.experiments.trials import names_of
from raytrain.runs.documents import CONFIG, run_store
from raytrain.runs.metric_row import MetricRow, own_metrics
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import EndStatus
from raytrain.runs.records import RunInfo, RunRecord, read_run

_NUM_THREADS = 8  # that read the histories of a list of runs


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison. Values that are not known yet are None.

    ``options`` has only those in which the runs differ. ``best_value`` is the best value of the metric of ``--best``,
    ``best_metric``, in any evaluation; ``validation_accuracy`` and ``validation_loss`` are from the last one. ``loss``
    is that of the last row of training steps, ``images_per_s`` the median after the first tenth of the steps, as in a
    sweep, ``seconds`` the time of all attempts so far, start-ups included, and ``skipped`` the number of images that
    could not be used.
    """

    name: str
    options: dict[str, Any]
    status: str
    steps: int
    epochs: float
    best_metric: str
    best_value: float | None
    validation_accuracy: float | None
    validation_loss: float | None
    loss: float | None
    images_per_s: float | None
    seconds: float | None
    skipped: int
    metrics: dict[str, float | None]
    """The last value of each metric that the loop logs or measures besides loss and accuracy, by name."""


def compare(runs: str | Sequence[str], *others: str, storage: Location = "./runs") -> list[ComparedRun]:
    """Compare ``runs`` and ``others``, in the order of their names; a sweep, which may be alone, stands for its trials.

    Trials that have not begun are left out. Raises UsageError if fewer than two runs remain, or one does not exist.

    Example: ``raytrain.compare("first", "second")[0].validation_accuracy``, or with a list of names
    """
    names = [runs] if isinstance(runs, str) else runs
    return compare_records(read_runs([*names, *others] if others else names, os.fspath(storage)))


def read_runs(runs: Sequence[str], storage: str) -> list[RunRecord]:
    """Read all documents of two or more ``runs``, each once; a sweep stands for those of its trials that have begun.

    Raises UsageError as :func:`compare` does.
    """
    if not isinstance(runs, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # a user's call
        kind = type(cast(object, runs)).__name__
        raise UsageError(
            f'The runs to compare are of type {kind}; give their names, as in raytrain.compare(["first", result.name]).'
        )
    asked_for = dict.fromkeys(name for run in runs for name in names_of(storage, run))
    names = [name for name in asked_for if run_store(storage, name).exists(CONFIG)]
    if len(names) < 2:
        raise UsageError(
            "raytrain compare takes two runs or more, or a sweep, each named once; "
            f"`{shell_command('runs', storage=storage)}` lists them."
        )
    return [read_run(storage, name) for name in names]


def compare_records(records: Sequence[RunRecord]) -> list[ComparedRun]:
    """Compare runs whose documents have been read already, as :func:`compare` does."""
    # Options that a run's loop does not use make no difference. A run whose options cannot be read has none here.
    used_options = [
        {name: value for name, value in vars(record.config).items() if name not in record.unused_options}
        if record.config
        else dict[str, Any]()
        for record in records
    ]
    differing = differing_options(used_options)
    compared: list[ComparedRun] = []
    for record, options in zip(records, used_options, strict=True):
        # Everything is read from the history, because a run that still trains has no summary.
        rows = record.metrics
        evaluation, training = last_row(rows, "evaluation"), last_row(rows, "step")
        # Not every step has a row, so the run may have stopped after the last one.
        steps = max(record.status.step, rows[-1].step if rows else 0)
        compared.append(
            ComparedRun(
                name=record.name,
                options={name: options.get(name) for name in differing},
                status=record.status.status,
                steps=steps,
                epochs=round(steps / record.steps_per_epoch, 2),
                best_metric=record.best_metric,
                best_value=_best_value(record.config, rows),
                validation_accuracy=evaluation and evaluation.accuracy,
                validation_loss=evaluation and evaluation.loss,
                loss=training and training.loss,
                images_per_s=images_per_s(rows),
                seconds=record.elapsed_s or None,
                skipped=len(record.skipped),
                metrics=own_metrics(training, evaluation),
            )
        )
    return compared


def with_measured(runs: Sequence[RunInfo], storage: str) -> list[RunInfo]:
    """Return ``runs`` with what the history says of the evaluations of those that have not ended.

    These have no summary yet, or that of an earlier attempt. A history that cannot be read changes nothing.

    Example: ``with_measured(list_runs("./runs"), "./runs")[0].best_value``
    """

    def measured(run: RunInfo) -> RunInfo:
        if not run.status.step or run.status.status in get_args(EndStatus):
            return run
        with suppress(RaytrainError):
            rows = read_metrics(run_store(storage, run.name).fail_fast())
            evaluation = last_row(rows, "evaluation")
            return dataclasses.replace(
                run,
                validation_accuracy=evaluation and evaluation.accuracy,
                best_value=_best_value(run.config, rows),
            )
        return run

    with ThreadPoolExecutor(_NUM_THREADS) as threads:  # a sweep that was killed may have left a hundred of them
        return list(threads.map(measured, runs))


def _best_value(config: TrainConfig | None, rows: Sequence[MetricRow]) -> float | None:
    """Return the best value of the metric of ``--best`` in any evaluation; None if it was never measured."""
    metric = best_metric_of(config)
    values = [row.metrics.get(metric.name) for row in rows if row.kind == "evaluation"]
    measured = [value for value in values if value is not None and not math.isnan(value)]
    return max(measured, key=metric.score, default=None)


SortKey = Literal["heartbeat", "name", "recipe", "status", "step", "best", "accuracy", "time", "cost"]

_WORDS: dict[SortKey, Callable[[RunInfo], str]] = {
    "name": lambda run: run.name,
    "recipe": lambda run: run.recipe,
    "status": lambda run: run.status.status,
}
_NUMBERS: dict[SortKey, Callable[[RunInfo], float | None]] = {
    "heartbeat": lambda run: run.status.heartbeat and run.status.heartbeat.timestamp(),
    "step": lambda run: run.status.step,
    "accuracy": lambda run: run.validation_accuracy,
    "time": lambda run: run.seconds,
    "cost": lambda run: run.status.dollars,
}


def sort_runs(runs: Sequence[RunInfo], key: SortKey) -> list[RunInfo]:
    """Return the runs sorted by ``key``: words alphabetically, numbers from the largest down, unknown values last.

    With the key ``best``, the best run comes first. Values of different metrics cannot be compared, so runs with the
    same metric of --best stand together, those with the most frequent metric first.

    Example: ``sort_runs(list_runs("./runs"), "best")[0].name``
    """
    if key in _WORDS:
        return sorted(runs, key=_WORDS[key])
    if key in _NUMBERS:
        numbers = {run.name: _NUMBERS[key](run) for run in runs}
        return sorted(runs, key=lambda run: -math.inf if (value := numbers[run.name]) is None else value, reverse=True)

    # By the best value, within the runs of each metric. Metrics that are equally frequent are sorted by their names.
    frequency = Counter(run.best_metric for run in runs if run.best_value is not None)

    def rank(run: RunInfo) -> tuple[bool, int, str, float]:
        """Return what runs are sorted by. It begins with True for a run without a value, which comes last."""
        if run.best_value is None:
            return True, 0, "", 0.0
        metric = best_metric_of(run.config)
        return False, -frequency[metric.name], metric.name, -metric.score(run.best_value)

    return sorted(runs, key=rank)


def differing_options(used: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the options in which runs differ; ``used`` has the options that each run uses.

    Options that do not change what a run computes are left out. A run that does not use an option does not differ in it
    from the others.
    """
    ignored = not_compared()
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in ignored]
    return [name for name in names if len({values[name] for values in used if name in values}) > 1]


def not_compared() -> set[str]:
    """Return the names of the options that name or describe a run or its command, and do not change what it computes.

    Example: ``"storage" in not_compared() and "seed" not in not_compared()``
    """
    return {*options_with(Mark.DESCRIBES_RUN), *options_with(Mark.OF_COMMAND)}


def last_row(rows: Sequence[MetricRow], kind: str) -> MetricRow | None:
    """Return the last of the ``rows`` that is of the ``kind``; None if there is none."""
    return next((row for row in reversed(rows) if row.kind == kind), None)
