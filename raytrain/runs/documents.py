"""A run's documents: their names, and how they are opened, read and written."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.values import matches
from raytrain.errors import UsageError, did_you_mean
from raytrain.storage.store import Store

CONFIG = "config.json"
CLAIM = "claim.json"
CLASSES = "classes.json"
MANIFEST = "manifest.parquet"
TEST_MANIFEST = "test-manifest.parquet"
IMAGES = "images.json"
METRICS = "metrics.jsonl"
SKIPPED = "skipped.jsonl"
EVENTS = "events.jsonl"
EVALUATION = "evaluation.json"
STATUS = "status.json"
MACHINES = "machines.json"
MACHINE_HISTORY = "machine-history.json"
SUMMARY = "summary.json"
SWEEP = "sweep.json"
STOP_REQUEST = "stop-request.json"
CHECKPOINTS = "checkpoints/"
LOGS = "logs/"
TRACE = "trace/"
TRACKERS = "trackers/"

Config = TypeVar("Config", bound=TrainConfig)

_MOST_NAMES = 10  # in one line
_OWN = re.compile(
    "|".join(
        [
            *map(re.escape, [CONFIG, CLAIM, CLASSES, MANIFEST, TEST_MANIFEST, IMAGES, EVALUATION, STATUS, MACHINES]),
            *map(re.escape, [MACHINE_HISTORY, SUMMARY, SWEEP, STOP_REQUEST]),
            *(rf"{re.escape(name)}(\.\d{{6}})?" for name in (METRICS, SKIPPED, EVENTS)),
            rf"{CHECKPOINTS}step-\d{{9}}(-\d+)?\.pt(\.json)?",
            rf"{LOGS}(driver|worker-\d+)-\w+\.(out|err|log)",
            rf"{TRACE}\d{{9,}}-\d{{9,}}-\d{{5,}}\.parquet",
            rf"{TRACKERS}[A-Za-z0-9_.-]+\.json",
        ]
    )
)

T = TypeVar("T")
Report = Callable[[str], None]  # gets a line about each document, or part of one, that cannot be used


def is_own(path: str) -> bool:
    """Whether a run writes a file of this name into its folder: nothing else there is ever deleted."""
    return _OWN.fullmatch(path) is not None


def encode_lines(documents: Iterable[Mapping[str, Any]]) -> bytes:
    """JSON lines of ``documents``; a number that is not finite becomes null."""
    return b"".join(json.dumps(plain(document), allow_nan=False).encode() + b"\n" for document in documents)


def ignore(problem: str) -> None:
    """The report of a caller that continues with what is whole."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; raises ValueError with what is wrong with it."""
    if not data.strip(b"\0"):
        raise ValueError("it is empty")
    try:
        document = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return cast(dict[str, Any], document)


def parse_line(line: bytes, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """What ``parse`` makes of a line; None if it is damaged, or ``parse`` raises KeyError, TypeError or ValueError."""
    with suppress(KeyError, TypeError, ValueError):
        return parse(plain(parse_object(line)))
    return None


def parse_lines(parse: Callable[[dict[str, Any]], T], lines: Iterable[bytes]) -> list[T]:
    """What ``parse`` makes of each line that is whole, as :func:`parse_line` says it."""
    return [row for line in lines if (row := parse_line(line, parse)) is not None]


def plain(value: Any) -> Any:
    """``value`` as lists, dictionaries and what JSON has, with None in place of every number that is not finite.

    Records (dataclasses and named tuples) become dictionaries, and arrays lists.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(one) for key, one in cast(dict[Any, Any], value).items()}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast(list[Any], value)]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def known_fields(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``document`` that the dataclass ``kind`` has a field for, if they are of the field's type."""
    hints = get_type_hints(kind)
    return {name: value for name, value in document.items() if name in hints and matches(value, hints[name])}


@cache
def warn_once(problem: str) -> None:
    """Warn of ``problem``, once in each process."""
    logging.getLogger("raytrain").warning("%s", problem)


def check_name(name: str) -> str:
    """``name``, if a run may have it; raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        folder, slash, last = name.rstrip("/").rpartition("/")
        hint = f" (a run in {folder} is named {last}, with --storage {folder})" if slash and folder else ""
        raise UsageError(
            f"--name is {name!r}{hint}; use up to 100 letters, digits, '.', '_' and '-', starting with a letter or "
            "digit."
        )
    return name


def new_name(recipe: str) -> str:
    """The name of a run that was given none: its recipe, the time, and a random end, as two may start in one second."""
    return f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def run_store(storage: str, name: str) -> Store:
    """The store of the run called ``name`` below ``storage``, whether the run exists or not."""
    from raytrain.storage.open import open_store  # deferred: the command line must start at once

    return open_store(f"{storage.rstrip('/')}/{check_name(name)}")


def open_run(storage: str, name: str) -> Store:
    """The store of a run that exists; raises UsageError with the names that come close if it does not."""
    store = run_store(storage, name)
    if not store.exists(CONFIG):
        raise UsageError(_no_such_run(storage, name))
    return store


def run_names(store: Store) -> list[str]:
    """The folders directly below ``store`` that hold a run's configuration."""
    paths = (stored.path.split("/") for stored in store.list())
    return sorted(parts[0] for parts in paths if len(parts) == 2 and parts[1] == CONFIG)


def read_config(store: Store, report: Report = warn_once) -> TrainConfig:
    """The options that the run last started with; ``report`` gets those that are unknown. UsageError if damaged."""
    return _read_config(store, TrainConfig, report)


def read_resolved_config(store: Store) -> ResolvedConfig:
    """The same with everything decided; raises UsageError also for a sweep, whose trials each have their own."""
    if store.exists(SWEEP):
        raise UsageError(f"{store.url} is a sweep; name one of its trials, which `raytrain runs` lists.")
    return _read_config(store, ResolvedConfig, warn_once)


def parse_config(kind: type[Config], data: bytes, report: Report = ignore) -> Config:
    """The options in a ``config.json``, ``report`` gets those that are unknown; ValueError for a value."""
    document = parse_object(data)
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(document) - known):
        names = ", ".join(repr(name) for name in unknown[:_MOST_NAMES]) + (" …" if len(unknown) > _MOST_NAMES else "")
        report(f"{CONFIG} has options that this version of raytrain does not know and ignores: {names}")
    try:
        return kind(**{name: value for name, value in document.items() if name in known})
    except TypeError:  # an option without a default is missing
        raise ValueError("it lacks options that a run has") from None


def write_config(store: Store, config: TrainConfig) -> None:
    """Write the options of a run, or of a sweep. Others know by this document that the run exists."""
    store.put(CONFIG, config.to_json().encode())


def read_json(store: Store, path: str, report: Report = ignore) -> dict[str, Any]:
    """A document of the run; an empty one if it does not exist, or is damaged, which ``report`` gets a line about."""
    try:
        return plain(parse_object(store.get(path)))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        report(f"{path} cannot be used ({error})")
        return {}


def write_json(store: Store, path: str, document: dict[str, Any]) -> None:
    """Write a document of the run."""
    store.put(path, (json.dumps(document, indent=2) + "\n").encode())


def _read_config(store: Store, kind: type[Config], report: Report) -> Config:
    try:
        return parse_config(kind, store.get(CONFIG), lambda problem: report(f"{store.url}/{problem}"))
    except ValueError as error:
        raise UsageError(
            f"{store.url}/{CONFIG} cannot be used ({str(error).rstrip('.')}); repair it, or start another run with "
            "another --name."
        ) from None


def _no_such_run(storage: str, name: str) -> str:
    from raytrain.storage.open import open_store

    names = run_names(open_store(storage))
    others = "`raytrain runs` lists the runs" if names else "there are no runs yet"
    return f"There is no run {name!r} in {storage}{did_you_mean(name, names)}; {others}."
