"""Stored runs: the list of them, filtered; tags, notes, deletion."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from raytrain.config import TrainConfig
from raytrain.config.option_values import matches
from raytrain.errors import StorageError, UsageError, did_you_mean, option_name
from raytrain.runs.documents import (
    CLAIM,
    CONFIG,
    FILES,
    IMAGES,
    STATUS,
    SUMMARY,
    SWEEP,
    UNUSED_OPTIONS,
    Report,
    is_run_file,
    open_run,
    parse_config,
    parse_object,
    plain,
    read_config,
    read_json,
    run_names,
    warn_once,
    write_config,
)
from raytrain.runs.metric_row import MetricRow, SkippedImage, steps_per_epoch
from raytrain.runs.metrics_history import read_metrics, read_skipped
from raytrain.runs.outcome import EndStatus, as_tuple
from raytrain.runs.ownership import claim_run
from raytrain.runs.provenance import Provenance, read_provenance
from raytrain.runs.status import RunStatus, parse_status, stored_status
from raytrain.runs.stored_checkpoints import list_checkpoints, newest_checkpoint
from raytrain.storage.folder import links_out
from raytrain.storage.store import Store, StoredObject

T = TypeVar("T")
_LISTED = (CONFIG, STATUS, SUMMARY, UNUSED_OPTIONS)  # the documents that the list of runs is made of


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run in the list of runs. ``problems`` are sentences about documents that cannot be used.

    ``config`` is None if the options cannot be read.
    """

    name: str
    config: TrainConfig | None
    status: RunStatus
    validation_accuracy: float | None = None
    best_value: float | None = None
    """The best value of the metric of ``--best``, according to the summary, as is the accuracy."""
    seconds: float | None = None
    """Duration of all attempts, according to the summary."""
    unused_options: tuple[str, ...] = ()
    """Options that change nothing, because the run's own loop does not use them."""
    problems: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """The recipe that the run was started from; empty if its options cannot be read."""
        return self.config.recipe if self.config else ""

    @property
    def best_metric(self) -> str:
        """The metric of ``--best``; the accuracy if its options cannot be read."""
        return self.config.best_metric if self.config else "accuracy"

    @property
    def tags(self) -> tuple[str, ...]:
        """The words of ``--tag``, by which the run can be found."""
        return self.config.tag if self.config else ()


@dataclass(frozen=True, kw_only=True)
class RunRecord(RunInfo):
    """All documents of a run in storage, except its manifests."""

    images: dict[str, Any]
    """The numbers of images for ``training``, ``validation`` and ``test``, and of files ``left_out``, by reason."""
    summary: dict[str, Any]
    metrics: list[MetricRow]
    checkpoints: list[StoredObject]
    skipped: list[SkippedImage]
    files: list[StoredObject] = field(default_factory=list[StoredObject])
    """What the run's own loop has written into its folder."""
    provenance: tuple[Provenance, ...] = ()
    """Commit, packages, command and code of its attempts, the newest last."""
    sweep: dict[str, Any] = field(default_factory=dict[str, Any])
    """The document of a sweep, with its points; empty for a run."""

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch, as far as they are known from the status and from metrics of whole epochs."""
        return max(self.status.min_steps_per_epoch, steps_per_epoch(self.metrics))

    @property
    def elapsed_s(self) -> float:
        """The time of all attempts so far: that of the latest among the status, the summary and the metrics."""
        return max(self.status.elapsed_s, self.seconds or 0.0, self.metrics[-1].elapsed_s if self.metrics else 0.0)


def list_runs(storage: str, report: Report = warn_once) -> list[RunInfo]:
    """Return every run below ``storage``, newest heartbeat first.

    A document that is damaged, or that storage refuses, becomes a problem of its run. A folder that cannot be a run or
    cannot be read is left out, and ``report`` gets a sentence about it. Raises StorageError if storage is out of reach,
    or refuses the options of all runs.

    Example: ``[run.name for run in list_runs("s3://bucket/runs") if run.status.active]``
    """
    from raytrain.storage.open import open_store  # deferred: the command line must start at once

    store = open_store(storage)
    names = run_names(store, report)
    documents = [store.get_many([f"{name}/{path}" for name in names]) for path in _LISTED]
    # If storage refuses the options of all runs, it is out of reach, or the keys lack the right to read.
    refusals = [config for config in documents[0] if isinstance(config, StorageError)]
    if refusals and len(refusals) == len(names):
        raise refusals[0]
    runs = [_run_info(name, *contents) for name, *contents in zip(names, *documents, strict=True)]
    return sorted(runs, key=lambda run: run.status.heartbeat_at, reverse=True)


def read_run(storage: str, name: str) -> RunRecord:
    """Return all documents of a run that can be used; raise UsageError if there is no such run.

    A document that is missing or damaged is empty or None. Raises StorageError if storage is out of reach.

    Example: ``read_run("./runs", "digits").metrics[-1].accuracy == 0.98``
    """
    store = open_run(storage, name)
    info = _run_info(name, *store.get_many(_LISTED))
    problems = [*info.problems]

    # The numbers of images; empty if the document cannot be used.
    document = read_json(store, IMAGES)
    numbers = {part: document.get(part, 0) for part in ("training", "validation", "test")}
    left_out = document.get("left_out")
    is_usable = "training" in document and matches(numbers, dict[str, int]) and matches(left_out, dict[str, int])
    more: dict[str, Any] = {
        "images": {**numbers, "left_out": left_out} if is_usable else {},
        "summary": read_json(store, SUMMARY),
        "sweep": read_json(store, SWEEP),
        "metrics": read_metrics(store, problems.append),
        "checkpoints": list_checkpoints(store),
        "files": [*store.list(FILES)],
        "skipped": read_skipped(store, problems.append),
        "provenance": read_provenance(store, problems.append),
        "problems": tuple(problems),
    }
    return RunRecord(**vars(info) | more)


def read_unused_options(store: Store) -> tuple[str, ...]:
    """Return the options that have no effect in a run, because its own loop does not use them."""
    return _names_of_options(read_json(store, UNUSED_OPTIONS))


def _names_of_options(document: dict[str, Any]) -> tuple[str, ...]:
    names: Any = document.get("options")
    return tuple(names) if matches(names, list[str]) else ()


def _run_info(
    name: str,
    config: bytes | Exception,
    status: bytes | Exception,
    summary: bytes | Exception,
    unused: bytes | Exception,
) -> RunInfo:
    """Return a run of the list from the contents of four documents, each of which may be an exception instead."""
    # Parse each document by itself, because one may be damaged and the others not.
    problems: list[str] = []
    options = _parse_document(
        CONFIG, config, lambda data: parse_config(TrainConfig, data, problems.append), problems.append
    )
    result: dict[str, Any] = plain(_parse_document(SUMMARY, summary, parse_object, problems.append) or {})
    progress: dict[str, Any] = plain(_parse_document(STATUS, status, parse_object, problems.append) or {})
    numbers = {key: result.get(key) for key in ("validation_accuracy", "best_value")}
    numbers["seconds"] = result.get("total_seconds") or result.get("seconds")
    return RunInfo(
        name=name,
        config=options,
        status=parse_status(progress, problems.append),
        unused_options=_names_of_options(_parse_document(UNUSED_OPTIONS, unused, parse_object, problems.append) or {}),
        problems=tuple(problems),
        **{key: value for key, value in numbers.items() if isinstance(value, float)},
    )


def _parse_document(path: str, content: bytes | Exception, parse: Callable[[bytes], T], report: Report) -> T | None:
    """Return the result of ``parse`` for a document; None if there is none, or ``report`` says why it is unusable."""
    try:
        if isinstance(content, Exception):
            raise content
        return parse(content)
    except FileNotFoundError:
        return None
    except (StorageError, ValueError) as error:
        report(f"{path} cannot be used ({str(error).rstrip('.')})")
        return None


_STATUSES = "starting", "running", *get_args(EndStatus), "interrupted"
_FIELDS = {option_name(name): name for name in vars(TrainConfig(batch_size=1))}  # by the names of their flags


def select_runs(runs: Sequence[RunInfo], conditions: Sequence[str]) -> list[RunInfo]:
    """Return the runs that meet all ``conditions``; raise UsageError for a condition that cannot be read.

    A condition is ``status=STATUS``, or the name of an option's flag, without dashes, with a value.

    Example: ``select_runs(list_runs("./runs"), ["status=finished", "learning-rate=0.1"])``
    """
    # Read all conditions first, so that a mistake in one is refused even if there are no runs.
    values: list[tuple[str, str]] = []  # name and value of each condition
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise UsageError(f"--filter {condition!r} has no =; write status=finished, tag=WORD or learning-rate=0.1.")
        if name != "status" and name not in _FIELDS:
            hint = did_you_mean(name, ["status", *_FIELDS])
            raise UsageError(f"--filter {condition!r}: {name!r} is neither status nor an option of a run{hint}.")
        if name == "status" and value not in _STATUSES:
            hint = did_you_mean(value, _STATUSES)
            raise UsageError(
                f"--filter {condition!r}: {value!r} is no status{hint}; it is one of {', '.join(_STATUSES)}."
            )
        values.append((name, value))
    return [run for run in runs if all(_meets(run, name, value) for name, value in values)]


def _meets(run: RunInfo, name: str, value: str) -> bool:
    """Return True if the status, or one of the values of the option ``name``, is ``value`` as the user has typed it."""
    if name == "status":
        return run.status.status == value
    for stored in as_tuple(getattr(run.config, _FIELDS[name], None)):
        if isinstance(stored, (int, float)) and not isinstance(stored, bool):
            with suppress(ValueError):  # 0.10 is 0.1
                if stored == float(value):
                    return True
                continue
        if str(stored).lower() == value.lower():  # none is None, and true is True
            return True
    return False


def tag_run(
    storage: str, name: str, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None
) -> TrainConfig:
    """Add and remove tags of a run, and replace its note if one is given; return its options.

    An empty note removes the note. Raises UsageError if there is no such run, or if it lacks one of the tags to remove;
    then nothing is changed.
    """
    store = open_run(storage, name)
    config = read_config(store)
    if missing := [tag for tag in remove if tag not in (*config.tag, *add)]:
        its_tags = f"its tags are {', '.join(config.tag)}" if config.tag else "it has no tags"
        raise UsageError(f"{name} has no tag {missing[0]!r}{did_you_mean(missing[0], config.tag)}; {its_tags}.")
    tags = tuple(tag for tag in dict.fromkeys([*config.tag, *add]) if tag not in remove)
    changed = dataclasses.replace(config, tag=tags, note=config.note if note is None else note or None)
    if changed != config:
        write_config(store, changed)
    return changed


def has_ended_without_step(store: Store) -> bool:
    """Return True if a run is there that has ended before its first step, so that nothing of it can be resumed.

    It is never true of a sweep, which has no checkpoint: its trials have them.
    """
    if not store.exists(CONFIG) or store.exists(SWEEP):
        return False
    written = read_json(store, STATUS)
    status = parse_status(written)
    # A run without a status may be about to write it, so it has not ended.
    has_ended = bool(written) and (not stored_status(written).active or status.is_gone)
    return has_ended and status.status != "finished" and not status.step and newest_checkpoint(store) is None


def delete_run(storage: str, name: str) -> tuple[int, list[str]]:
    """Delete the files that a run has written; return their number, and the paths of the files that are left.

    Files with other names, and those that links lead to, are left. Takes up to half a minute if the last owner may be
    alive. Raises UsageError if there is no such run, or if it is training.
    """
    with claim_run(open_run(storage, name), name) as claim:  # its end deletes the claim of a run without options
        store = claim.owned_store
        paths = [stored.path for stored in store.list() if stored.path not in (CLAIM, CONFIG)]
        foreign = {path for path in paths if not is_run_file(path)}
        paths_kept = sorted(foreign.union(links_out(open_run(storage, name), paths)))
        run_files = sorted(set(paths).difference(paths_kept))
        for path in [*run_files, CONFIG]:  # the options last: until then the run is listed, and can be deleted again
            store.delete(path)
        store.abort_uploads(is_run_file, idle_s=-math.inf)  # at once: nobody else may write to this run any more
    num_deleted = len(run_files) + 1  # with the options
    return num_deleted, paths_kept
