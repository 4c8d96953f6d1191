"""All about one run, and the list of all runs, read from storage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.runs.checkpoint_files import list_checkpoints
from raytrain.runs.documents import open_run, read_config, read_json, run_names
from raytrain.runs.history import read_metrics, read_skipped
from raytrain.runs.layout import CONFIG, STATUS, SUMMARY
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.skipped_images import SkippedImage
from raytrain.runs.status import RunStatus, parse_status, read_status

if TYPE_CHECKING:
    from raytrain.storage.base import Store, StoredObject


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One line of the list of runs."""

    name: str
    recipe: str
    status: RunStatus
    test_accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything that storage holds of a run, apart from its manifests."""

    name: str
    config: TrainConfig
    status: RunStatus
    summary: dict[str, Any]
    metrics: list[MetricRow]
    checkpoints: list[StoredObject]
    skipped: list[SkippedImage]


def list_runs(storage: str) -> list[RunInfo]:
    """Every run below ``storage``, the one with the newest heartbeat first."""
    from raytrain.storage.open import open_store  # deferred: the command line must start at once

    store = open_store(storage)
    names = run_names(store)
    documents = [_documents(store, names, path) for path in (CONFIG, STATUS, SUMMARY)]
    runs = [
        RunInfo(
            name=name,
            recipe=config.get("recipe", ""),
            status=parse_status(status),
            test_accuracy=summary.get("test_accuracy"),
        )
        for name, config, status, summary in zip(names, *documents, strict=True)
    ]
    return sorted(runs, key=lambda run: run.status.heartbeat_at, reverse=True)


def read_run(storage: str, name: str) -> RunRecord:
    """All documents of a run; raises UsageError if there is no such run."""
    store = open_run(storage, name)
    return RunRecord(
        name=name,
        config=read_config(store),
        status=read_status(store),
        summary=read_json(store, SUMMARY),
        metrics=read_metrics(store),
        checkpoints=list_checkpoints(store),
        skipped=read_skipped(store),
    )


def _documents(store: Store, names: list[str], path: str) -> list[dict[str, Any]]:
    """The same document of many runs; an empty one for a run that lacks it."""
    found = store.get_many([f"{name}/{path}" for name in names])
    for problem in found:
        if isinstance(problem, Exception) and not isinstance(problem, FileNotFoundError):
            raise problem
    return [json.loads(data) if isinstance(data, bytes) else {} for data in found]
