"""Stored runs: the list of them, filtered and sorted; tags, notes, deletion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from raytrain.config import TrainConfig
from raytrain.config.values import matches
from raytrain.errors import StorageError, UsageError, did_you_mean, option_name
from raytrain.runs.checkpoint_files import list_checkpoints
from raytrain.runs.documents import (
    CLAIM,
    CONFIG,
    IMAGES,
    STATUS,
    SUMMARY,
    Report,
    is_own,
    open_run,
    parse_config,
    parse_object,
    plain,
    read_config,
    read_json,
    run_names,
    write_config,
)
from raytrain.runs.history import read_metrics, read_skipped
from raytrain.runs.metric_row import MetricRow, SkippedImage
from raytrain.runs.outcome import as_tuple
from raytrain.runs.ownership import claim_run
from raytrain.runs.status import RunStatus, parse_status
from raytrain.storage.store import StoredObject

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

    images: dict[str, Any]
    """How many images are for training and for test, and how many files are left out, by reason."""
    summary: dict[str, Any]
    metrics: list[MetricRow]
    checkpoints: list[StoredObject]
    skipped: list[SkippedImage]


def list_runs(storage: str) -> list[RunInfo]:
    """Every run below ``storage``, newest heartbeat first. What one lacks hides no other; StorageError without any."""
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
        "images": _image_counts(read_json(store, IMAGES)),
        "summary": read_json(store, SUMMARY),
        "metrics": read_metrics(store, problems.append),
        "checkpoints": list_checkpoints(store),
        "skipped": read_skipped(store, problems.append),
        "problems": tuple(problems),
    }
    return RunRecord(**vars(info) | more)


def _image_counts(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's document says of its images; empty if it cannot be used."""
    numbers = {name: document.get(name) for name in ("training", "test")}
    left_out = document.get("left_out")
    known = matches(numbers, dict[str, int]) and matches(left_out, dict[str, int])
    return {**numbers, "left_out": left_out} if known else {}


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


SortKey = Literal["heartbeat", "name", "recipe", "status", "step", "accuracy"]

_KEYS: dict[SortKey, Callable[[RunInfo], Any]] = {
    "heartbeat": lambda run: run.status.heartbeat_at,
    "name": lambda run: run.name,
    "recipe": lambda run: run.recipe,
    "status": lambda run: run.status.status,
    "step": lambda run: run.status.step,
    "accuracy": lambda run: -1.0 if run.test_accuracy is None else run.test_accuracy,
}
_DESCENDING = ("heartbeat", "step", "accuracy")
_OPTIONS = {option_name(name): name for name in vars(TrainConfig(batch_size=1))}


def select_runs(runs: Sequence[RunInfo], conditions: Sequence[str], sort: SortKey) -> list[RunInfo]:
    """The runs that match ``conditions`` such as ``learning-rate=0.1``, sorted; UsageError for one it can't read."""
    wanted = [_parse(condition) for condition in conditions]
    found = [run for run in runs if all(_matches(run, name, value) for name, value in wanted)]
    return sorted(found, key=_KEYS[sort], reverse=sort in _DESCENDING)


def _parse(condition: str) -> tuple[str, str]:
    name, equals, value = condition.partition("=")
    if not equals:
        raise UsageError(f"--filter {condition!r} has no =; write status=finished, tag=WORD or learning-rate=0.1.")
    if name != "status" and name not in _OPTIONS:
        hint = did_you_mean(name, ["status", *_OPTIONS])
        raise UsageError(f"--filter {condition!r}: {name!r} is neither status nor an option of a run{hint}.")
    return name, value


def _matches(run: RunInfo, name: str, value: str) -> bool:
    if name == "status":
        return run.status.status == value
    found: object = getattr(run.config, _OPTIONS[name], None)
    return any(_equals(part, value) for part in as_tuple(found))


def _equals(found: object, value: str) -> bool:
    """Whether an option is ``value`` as it is typed: 0.10 is 0.1, and none is None."""
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        with suppress(ValueError):
            return found == float(value)
    return str(found).lower() == value.lower()


def tag_run(
    storage: str, name: str, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None
) -> TrainConfig:
    """Change the tags of a run, and its note if one is given; returns its options. Raises UsageError without a run."""
    store = open_run(storage, name)
    config = read_config(store)
    tags = tuple(tag for tag in dict.fromkeys([*config.tag, *add]) if tag not in remove)
    changed = dataclasses.replace(config, tag=tags, note=config.note if note is None else note or None)
    if changed != config:
        write_config(store, changed)
    return changed


def delete_run(storage: str, name: str) -> tuple[int, list[str]]:
    """Delete what a run wrote; returns how many files that were, and the paths of those that are left.

    Files of other names, and what links lead to, are not the run's. Takes up to half a minute if its last owner may be
    alive. Raises UsageError if there is no such run, or it trains.
    """
    from raytrain.storage.folder import links_out

    with claim_run(open_run(storage, name), name) as claim:  # its end deletes the claim of a run without options
        store = claim.owned_store
        paths = [found.path for found in store.list() if found.path not in (CLAIM, CONFIG)]
        left = sorted({path for path in paths if not is_own(path)}.union(links_out(open_run(storage, name), paths)))
        own = sorted(set(paths).difference(left))
        for path in [*own, CONFIG]:  # the options last: until then the run is listed, and can be deleted again
            store.delete(path)
    return len(own) + 1, left
