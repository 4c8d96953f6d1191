"""A run in storage: where its documents lie, how they are read and written, and how it is asked to stop."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from raytrain.config import TrainConfig
from raytrain.errors import StorageError, UsageError
from raytrain.runs.history import METRICS, SKIPPED, Row, read_lines
from raytrain.runs.layout import CHECKPOINTS, CONFIG, STATUS, STOP_REQUEST, SUMMARY

if TYPE_CHECKING:
    from raytrain.storage.base import Store, StoredObject

HEARTBEAT_EVERY_S = 10.0
"""Seconds between writings of a running run's status."""
_SILENT_AFTER = timedelta(seconds=60)
_CHECKPOINT = re.compile(r"step-(\d{9})\.pt$")


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far a run is; in storage it is as old as ``heartbeat_at`` (ISO 8601, UTC), which :func:`write_status` stamps.

    ``status`` is starting, running, finished, stopped or failed, and for the reader also interrupted: the run says that it goes
    on, but the process ``pid`` on ``host`` that said so is gone, or has been silent for a minute.
    """

    status: str
    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    num_epochs: int = 0
    num_workers: int = 0
    heartbeat_at: str = ""
    host: str = ""
    pid: int = 0

    @property
    def active(self) -> bool:
        """Whether somebody is training."""
        return self.status in ("starting", "running")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One line of the list of runs."""

    name: str
    recipe: str
    status: RunStatus
    test_accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that a run has told so far; ``metrics`` are its history, ``skipped`` the images that it could not use."""

    name: str
    config: TrainConfig
    status: RunStatus
    summary: dict[str, Any]
    metrics: list[Row]
    checkpoints: list[StoredObject]
    skipped: list[Row]


def check_name(name: str) -> str:
    """``name``, if a run may be called so; raises UsageError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"--name is {name!r}; use up to 100 letters, digits, '.', '_' and '-', a letter or digit first.")
    return name


def new_name(recipe: str) -> str:
    """The name of a run that was given none: its recipe and the time."""
    return f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"


def run_store(storage: str, name: str) -> Store:
    """The place of the run called ``name`` below ``storage``, whether it is there or not."""
    from raytrain.storage.base import open_store  # not before it is needed: the command line must start at once

    return open_store(f"{storage.rstrip('/')}/{check_name(name)}")


def open_run(storage: str, name: str) -> Store:
    """The place of a run that is there; raises UsageError with the names that come close for one that is not."""
    store = run_store(storage, name)
    if not store.exists(CONFIG):
        raise UsageError(_no_such_run(storage, name))
    return store


def list_runs(storage: str) -> list[RunInfo]:
    """Every run below ``storage``, the one heard of last first."""
    from raytrain.storage.base import open_store

    store = open_store(storage)
    names = _names(store)
    documents = [_documents(store, names, path) for path in (CONFIG, STATUS, SUMMARY)]
    runs = [
        RunInfo(
            name=name,
            recipe=config.get("recipe", ""),
            status=_parsed_status(status),
            test_accuracy=summary.get("test_accuracy"),
        )
        for name, config, status, summary in zip(names, *documents, strict=True)
    ]
    return sorted(runs, key=lambda run: run.status.heartbeat_at, reverse=True)


def read_run(storage: str, name: str) -> RunRecord:
    """All documents of a run; raises UsageError where there is no such run."""
    store = open_run(storage, name)
    return RunRecord(
        name=name,
        config=read_config(store),
        status=read_status(store),
        summary=read_json(store, SUMMARY),
        metrics=read_lines(store, METRICS),
        checkpoints=list_checkpoints(store),
        skipped=read_lines(store, SKIPPED),
    )


def read_config(store: Store) -> TrainConfig:
    """The run's options, as they were when it last started."""
    return TrainConfig.from_json(store.get(CONFIG).decode())


def write_config(store: Store, config: TrainConfig) -> None:
    """Keep the run's options."""
    store.put(CONFIG, config.to_json().encode())


def read_json(store: Store, path: str) -> dict[str, Any]:
    """A document of the run; an empty one where there is none."""
    try:
        return json.loads(store.get(path))
    except FileNotFoundError:
        return {}


def write_json(store: Store, path: str, document: dict[str, Any]) -> None:
    """Keep a document of the run."""
    store.put(path, (json.dumps(document, indent=2) + "\n").encode())


def read_status(store: Store) -> RunStatus:
    """How far the run is."""
    return _parsed_status(read_json(store, STATUS))


def write_status(store: Store, status: RunStatus) -> None:
    """Say how far the run is, as of now."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    written = dataclasses.replace(status, heartbeat_at=now, host=socket.gethostname(), pid=os.getpid())
    write_json(store, STATUS, dataclasses.asdict(written))


def mark_failed(storage: str, name: str) -> None:
    """Say of a run that was to begin again that it failed; not to be heard where storage is away."""
    store = run_store(storage, name)
    with suppress(StorageError):
        write_status(store, dataclasses.replace(read_status(store), status="failed"))


def list_checkpoints(store: Store) -> list[StoredObject]:
    """The run's checkpoints, oldest first."""
    return sorted((stored for stored in store.list(CHECKPOINTS) if _CHECKPOINT.search(stored.path)), key=lambda stored: stored.path)


def best_checkpoint(store: Store) -> str | None:
    """The checkpoint with the highest test accuracy; where none was evaluated, the newest."""
    paths = [found.path for found in list_checkpoints(store)]
    return max(((_accuracy(store, path), path) for path in paths), default=(0.0, None))[1]


def newest_step(store: Store) -> int:
    """The step after which the run would go on: its newest checkpoint's, 0 without one."""
    return max((int(found[1]) for stored in store.list(CHECKPOINTS) if (found := _CHECKPOINT.search(stored.path))), default=0)


def request_stop(storage: str, name: str, reason: str) -> None:
    """Ask a run, wherever it trains, to stop with a checkpoint; raises UsageError where it is unknown or trains no more."""
    store = open_run(storage, name)
    status = read_status(store)
    if not status.active:
        goes_on = "" if status.status == "finished" else "; --resume goes on with it"
        raise UsageError(f"Run {name!r} is not training: it is {status.status} at step {status.step:,}{goes_on}.")
    write_json(store, STOP_REQUEST, {"reason": reason})


def stop_requested(store: Store) -> str | None:
    """The reason of a stop request that lies in storage, if there is one."""
    return read_json(store, STOP_REQUEST).get("reason")


def clear_stop_request(store: Store) -> None:
    """Forget a stop request: it was meant for an earlier attempt."""
    store.delete(STOP_REQUEST)


def _accuracy(store: Store, checkpoint: str) -> float:
    return read_json(store, f"{checkpoint}.json").get("test_accuracy") or 0.0


def _names(store: Store) -> list[str]:
    """The folders right below ``store`` that hold a run's configuration."""
    paths = (stored.path.split("/") for stored in store.list())
    return sorted(parts[0] for parts in paths if len(parts) == 2 and parts[1] == CONFIG)


def _documents(store: Store, names: list[str], path: str) -> list[dict[str, Any]]:
    """The same document of many runs; an empty one where a run lacks it."""
    found = store.get_many([f"{name}/{path}" for name in names])
    for problem in found:
        if isinstance(problem, Exception) and not isinstance(problem, FileNotFoundError):
            raise problem
    return [json.loads(data) if isinstance(data, bytes) else {} for data in found]


def _parsed_status(document: dict[str, Any]) -> RunStatus:
    """A run that left no status, or a living one's status too long ago, was interrupted."""
    document = {"status": "interrupted", **document}
    status = RunStatus(**document)
    if status.active and (_is_silent(status) or _is_gone(status)):
        return dataclasses.replace(status, status="interrupted")
    return status


def _is_silent(status: RunStatus) -> bool:
    return datetime.now(timezone.utc) - datetime.fromisoformat(status.heartbeat_at) > _SILENT_AFTER


def _is_gone(status: RunStatus) -> bool:
    """Whether the process that trained was one of this machine's, and is no more."""
    if status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody else's: it lives
    return False


def _no_such_run(storage: str, name: str) -> str:
    from raytrain.storage.base import open_store

    names = _names(open_store(storage))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        hint = "`raytrain runs` lists those there are." if names else "there are none yet."
    return f"There is no run {name!r} in {storage}; {hint}"
