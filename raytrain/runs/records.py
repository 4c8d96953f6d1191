"""All about one run, and the list of all runs, read from storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from raytrain.config import TrainConfig
from raytrain.errors import StorageError
from raytrain.runs.checkpoint_files import list_checkpoints
from raytrain.runs.documents import open_run, parse_config, read_json, run_names
from raytrain.runs.history import read_metrics, read_skipped
from raytrain.runs.json_lines import Report, parse_object, plain
from raytrain.runs.layout import CONFIG, STATUS, SUMMARY
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.skipped_images import SkippedImage
from raytrain.runs.status import RunStatus, parse_status

if TYPE_CHECKING:
    from raytrain.storage.base import StoredObject

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One line of the list of runs. ``problems`` says what of its documents cannot be used."""

    name: str
    config: TrainConfig | None
    status: RunStatus
    test_accuracy: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """The recipe that the run was started from; empty if its options cannot be read."""
        return self.config.recipe if self.config else ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The words that the run is to be found by."""
        return self.config.tag if self.config else ()


@dataclass(frozen=True, kw_only=True)
class RunRecord(RunInfo):
    """Everything that storage holds of a run, apart from its manifests."""

    summary: dict[str, Any]
    metrics: list[MetricRow]
    checkpoints: list[StoredObject]
    skipped: list[SkippedImage]


def list_runs(storage: str) -> list[RunInfo]:
    """Every run below ``storage``, the one with the newest heartbeat first. What one run lacks hides no other run.

    Raises StorageError if storage is out of reach, or gives no document of any run.
    """
    from raytrain.storage.open import open_store  # deferred: the command line must start at once

    store = open_store(storage)
    names = run_names(store)
    documents = [store.get_many([f"{name}/{path}" for name in names]) for path in (CONFIG, STATUS, SUMMARY)]
    for refused in documents[0][:1]:
        if isinstance(refused, StorageError) and all(isinstance(each, StorageError) for each in documents[0]):
            raise refused
    runs = [_run_info(name, *found) for name, *found in zip(names, *documents, strict=True)]
    return sorted(runs, key=lambda run: run.status.heartbeat_at, reverse=True)


def read_run(storage: str, name: str) -> RunRecord:
    """All documents of a run, as far as they are whole; raises UsageError if there is no such run."""
    store = open_run(storage, name)
    info = _run_info(name, *store.get_many([CONFIG, STATUS, SUMMARY]))
    problems = [*info.problems]
    more: dict[str, Any] = {
        "summary": read_json(store, SUMMARY),
        "metrics": read_metrics(store, problems.append),
        "checkpoints": list_checkpoints(store),
        "skipped": read_skipped(store, problems.append),
        "problems": tuple(problems),
    }
    return RunRecord(**vars(info) | more)


def _run_info(name: str, config: bytes | Exception, status: bytes | Exception, summary: bytes | Exception) -> RunInfo:
    problems: list[str] = []
    options = _parsed(CONFIG, config, lambda data: parse_config(TrainConfig, data, problems.append), problems.append)
    accuracy = (_parsed(SUMMARY, summary, parse_object, problems.append) or {}).get("test_accuracy")
    return RunInfo(
        name=name,
        config=options,
        status=parse_status(_parsed(STATUS, status, parse_object, problems.append) or {}, problems.append),
        test_accuracy=plain(accuracy) if isinstance(accuracy, float) else None,
        problems=tuple(problems),
    )


def _parsed(path: str, found: bytes | Exception, parse: Callable[[bytes], T], report: Report) -> T | None:
    """What ``parse`` makes of a document; None if it does not exist, or cannot be used."""
    try:
        if isinstance(found, Exception):
            raise found
        return parse(found)
    except FileNotFoundError:
        return None
    except (StorageError, ValueError) as error:
        report(f"{path} cannot be used ({str(error).rstrip('.')})")
        return None
