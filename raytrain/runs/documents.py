"""A run's documents: their names, and how they are opened, read and written.

A run is a folder of a storage, named by its name, and exists once its options are there (``config.json``). Whoever
reads a document may be another version of raytrain, or find it half copied: a value that is unknown or damaged is left
out, and a ``report`` gets a sentence about it. Only options are required to be whole.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.named_functions import names_own_function, stored_function_error
from raytrain.config.option_values import fits_64_bits, matches
from raytrain.errors import UsageError, did_you_mean, shell_command
from raytrain.runs.redact import redact
from raytrain.storage.store import Store

CONFIG = "config.json"
CLAIM = "claim.json"
CLASSES = "classes.json"
MANIFEST = "manifest.parquet"
VALIDATION_MANIFEST = "validation-manifest.parquet"
TEST_MANIFEST = "test-manifest.parquet"  # only of runs with three parts
IMAGES = "images.json"
METRICS = "metrics.jsonl"
SKIPPED = "skipped.jsonl"
EVENTS = "events.jsonl"
EVALUATION = "evaluation.json"
STATUS = "status.json"
MACHINES = "machines.json"
MACHINE_HISTORY = "machine-history.json"
SUMMARY = "summary.json"
SUSPICIOUS_LABELS = "suspicious-labels.json"
SWEEP = "sweep.json"
STUDY = "study.jsonl"
STOP_REQUEST = "stop-request.json"
UNUSED_OPTIONS = "unused-options.json"
PROVENANCE = "provenance.json"
CHECKPOINTS = "checkpoints/"
LOGS = "logs/"
TRACE = "trace/"
TRACKERS = "trackers/"
TENSORBOARD = "tensorboard"
FILES = "files/"  # that a loop of the user's writes
CONFUSION_PICTURE, RATE_PICTURE, SWEEP_PICTURE = "confusion.png", "rate.png", "sweep.png"
"""Figures of ``evaluate``, ``find-rate`` and ``sweep``, unless they are to be written elsewhere."""

Config = TypeVar("Config", bound=TrainConfig)
T = TypeVar("T")
Report = Callable[[str], None]  # gets a sentence about each document, or part of one, that cannot be used

_MAX_NAMES_IN_LINE = 10
_MAX_LEVELS = 100  # of lists and dictionaries in a document; those that raytrain writes have fewer than ten
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a run
_SINGLE_FILES = (
    *(CONFIG, CLAIM, CLASSES, MANIFEST, VALIDATION_MANIFEST, TEST_MANIFEST, IMAGES, EVALUATION, STATUS, MACHINES),
    *(MACHINE_HISTORY, SUMMARY, SUSPICIOUS_LABELS, SWEEP, STOP_REQUEST, UNUSED_OPTIONS, PROVENANCE),
    *(CONFUSION_PICTURE, RATE_PICTURE, SWEEP_PICTURE),
)
_RUN_FILE = re.compile(
    "|".join(
        [
            *map(re.escape, _SINGLE_FILES),
            *(rf"{re.escape(name)}(\.\d{{6}})?" for name in (METRICS, SKIPPED, EVENTS, STUDY)),
            rf"{CHECKPOINTS}step-\d{{9}}(-\d+)?\.pt(\.json)?",
            rf"{LOGS}(driver|worker-\d+)-\w+\.(out|err|log)",
            rf"{TRACE}\d{{9,}}-\d{{9,}}-\d{{5,}}\.parquet",
            rf"{TRACKERS}[A-Za-z0-9_.-]+\.json",
            # Of a sweep, each trial has a folder. The names end with the time in nanoseconds, as only ours do.
            rf"{TENSORBOARD}/({_NAME.pattern}/)?events\.out\.tfevents\.\d+\.[^/]+\.\d{{19}}",
            rf"{FILES}.+",
        ]
    )
)


def is_run_file(path: str) -> bool:
    """Return True if a run writes a file of this name into its folder. Files of other names are never deleted."""
    return _RUN_FILE.fullmatch(path) is not None


# Runs by name


def new_name(recipe: str) -> str:
    """Return a name for a run that was given none: its recipe, the time, and a random end.

    The end keeps apart two runs that start in the same second.
    """
    return f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def check_name(name: object, option: str = "--name", storage: str = "") -> str:
    """Return ``name``, the value of ``option``, if a run may have it; raise UsageError otherwise.

    ``storage`` is where an existing run is looked for. If the name is a path, the advice in the error takes it as one
    below this storage.
    """
    if not isinstance(name, str):
        kind = type(name).__name__
        raise UsageError(f"{option} is of type {kind}; give text, such as the name of a result, result.name.")
    if not _NAME.fullmatch(name):
        # Users often give a path: of the run, of its folder as a shell completes it, or of a checkpoint.
        folder, slash, last = name.rstrip("/").rpartition("/")
        if slash and "://" in storage and "://" not in folder:  # a path in the bucket
            folder = f"{storage.rstrip('/')}/{folder}".rstrip("/")
        hint = f" (a run in {folder} is named {last}, with --storage {folder})" if slash and folder else ""
        if not slash and name.endswith("/"):
            hint = f" (did you mean {last}?)"
        if f"{folder}/".endswith(f"/{CHECKPOINTS}"):
            hint = " (a run is named, and its best checkpoint is used)"
        raise UsageError(
            f"{option} is {name!r}{hint}; use up to 100 letters, digits, '.', '_' and '-', starting with a letter or "
            "digit; the letters are a to z and A to Z."
        )
    return name


def run_store(storage: str, name: str) -> Store:
    """Return the store of the run called ``name`` below ``storage``, whether the run exists or not.

    Example: ``run_store("s3://bucket/runs", "digits").url == "s3://bucket/runs/digits"``
    """
    from raytrain.storage.open import open_store  # deferred: the command line must start at once

    folder = storage if storage.endswith("://") else (storage or ".").rstrip("/")
    return open_store(f"{folder}/{check_name(name, 'The name of a run', storage)}")


def open_run(storage: str, name: str) -> Store:
    """Return the store of a run; if the run does not exist, raise UsageError, which suggests similar names."""
    store = run_store(storage, name)
    if not store.exists(CONFIG):
        # List all names only for this sentence, because that takes long in a large bucket.
        from raytrain.storage.open import open_store

        names = run_names(open_store(storage))
        hint = f"`{shell_command('runs', storage=storage)}` lists the runs" if names else "there are no runs yet"
        raise UsageError(f"There is no run {name!r} in {storage}{did_you_mean(name, names)}; {hint}.")
    return store


def open_single_run(storage: str, name: str) -> Store:
    """Return the store of a run; raise UsageError if it does not exist, or is a sweep, whose trials are runs."""
    store = open_run(storage, name)
    _refuse_sweep(store)
    return store


def _refuse_sweep(store: Store) -> None:
    if store.exists(SWEEP):
        trials = shell_command("runs", storage=store.url.rstrip("/").rpartition("/")[0])
        raise UsageError(f"{store.url} is a sweep; name one of its trials, which `{trials}` lists.")


def run_names(store: Store, report: Report | None = None) -> list[str]:
    """Return the names of the folders directly below ``store`` that hold a run's options, sorted.

    ``report`` gets a sentence about each folder that is left out because it cannot be read, or has a name that no run
    may have. Raises UsageError if ``store`` is a folder that does not exist: most likely, its name is misspelt.
    """
    report = report or ignore
    if store.cloud is None and not os.path.lexists(store.url):
        raise UsageError(f"There is no folder {store.url} to look for runs in; check --storage, or train a run there.")
    names = store.folders_with(CONFIG, report)
    for name in sorted(names):
        if not _NAME.fullmatch(name):
            report(f"left out: no run may be called {name!r}; rename that folder in {store.url}, or move it elsewhere.")
    return sorted(filter(_NAME.fullmatch, names))


# The options of a run


def ignore(problem: str) -> None:
    """Do nothing: the :data:`Report` of a caller that goes on without damaged documents."""


@cache
def warn_once(problem: str) -> None:
    """Warn of ``problem``, once in each process."""
    logging.getLogger("raytrain").warning("%s", problem)


def write_config(store: Store, config: TrainConfig) -> None:
    """Write the options of a run, or of a sweep. A run exists for others once it has this document.

    Secrets are removed from tags and the note, which are a person's own words.
    """
    tags, note = tuple(map(redact, config.tag)), config.note and redact(config.note)
    store.put(CONFIG, dataclasses.replace(config, tag=tags, note=note).to_json().encode())


def read_config(store: Store, report: Report = warn_once) -> TrainConfig:
    """Return the options of the run's last attempt; ``report`` gets a sentence if some of them are unknown.

    Raises UsageError if the document is damaged.
    """
    return _read_config(store, TrainConfig, report)


def read_resolved_config(store: Store) -> ResolvedConfig:
    """Return the options of the run's last attempt, with everything decided.

    Raises UsageError if the document is damaged, or belongs to a sweep, whose trials each have options of their own.
    """
    _refuse_sweep(store)
    return _read_config(store, ResolvedConfig, warn_once)


def read_trusted_config(store: Store, *, trust: bool) -> ResolvedConfig:
    """Return the options of :func:`read_resolved_config`.

    Raises UsageError if they name code of the run's author as the network, unless the user says ``trust``.
    """
    config = read_resolved_config(store)
    if not trust and names_own_function(config.model):
        raise stored_function_error("model", config.model, f"{store.url}/{CONFIG}", may_be_named=False)
    return config


def _read_config(store: Store, kind: type[Config], report: Report) -> Config:
    """Return the options in ``config.json`` as a ``kind``: TrainConfig, or ResolvedConfig, in which all are decided."""
    try:
        # parse_config begins its sentence with the name of the document; complete that to its URL.
        return parse_config(kind, store.get(CONFIG), lambda problem: report(f"{store.url}/{problem}"))
    except ValueError as error:
        raise UsageError(
            f"{store.url}/{CONFIG} cannot be used ({str(error).rstrip('.')}); repair it, or start another run with "
            "another --name."
        ) from None


def parse_config(kind: type[Config], data: bytes, report: Report = ignore) -> Config:
    """Return the options in the content of a ``config.json``; ``report`` gets a sentence if some are unknown.

    Raises ValueError if it is damaged, or if an option has a value that it cannot have.
    """
    document = parse_object(data)
    # A newer version of raytrain may have written it, or an older one with options that are gone.
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(document) - known):
        names = ", ".join(repr(name) for name in unknown[:_MAX_NAMES_IN_LINE])
        more = " …" if len(unknown) > _MAX_NAMES_IN_LINE else ""
        report(f"{CONFIG} has options that this version of raytrain does not know and ignores: {names}{more}")
    try:
        return kind(**{name: value for name, value in document.items() if name in known})
    except TypeError:  # an option without a default is missing
        raise ValueError("it lacks options that a run has") from None


# Documents of JSON


def write_json(store: Store, path: str, document: dict[str, Any]) -> None:
    """Write a document of the run, in place of an earlier one; ``path`` is relative to the run's folder."""
    store.put(path, (json.dumps(document, indent=2) + "\n").encode())


def read_json(store: Store, path: str, report: Report = ignore) -> dict[str, Any]:
    """Return a document of the run; empty if there is none, or if it is damaged: then ``report`` gets a sentence.

    A number that is unusable is None: see :func:`plain`. Raises StorageError if storage is out of reach.
    """
    try:
        return plain(parse_object(store.get(path)))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        report(f"{path} cannot be used ({error})")
        return {}


def known_fields(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values of ``document`` that fit a field of the dataclass ``kind`` by name and type."""
    hints = get_type_hints(kind)
    return {name: value for name, value in document.items() if name in hints and matches(value, hints[name])}


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``; raise ValueError that says what is wrong with it."""
    if not data.strip(b"\0"):  # a machine that loses its power may leave a file of zeros
        raise ValueError("it is empty")
    try:
        document = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    # The parser allows about a thousand levels, at which functions that call themselves, such as plain, fail. A row of
    # a history has few brackets, so it need not be walked through.
    num_opened = data.count(b"[") + data.count(b"{")
    if num_opened > _MAX_LEVELS and _is_nested(cast(object, document), _MAX_LEVELS):
        raise ValueError("it is nested too deeply")
    return cast(dict[str, Any], document)


def _is_nested(value: object, levels: int) -> bool:
    """Return True if lists and dictionaries in ``value`` are nested in more than ``levels`` levels."""
    if not isinstance(value, (dict, list)):
        return False
    items = cast("dict[str, object]", value).values() if isinstance(value, dict) else cast("list[object]", value)
    return levels == 0 or any(_is_nested(item, levels - 1) for item in items)


def plain(value: Any) -> Any:
    """Return ``value`` as lists, dictionaries and values of JSON, with None for each number that is unusable.

    That is a number that is not finite, or a whole number that does not fit into 64 bits. Records (dataclasses and
    named tuples) become dictionaries, and arrays lists.

    Example: ``plain({"loss": float("nan"), "shape": (28, 28)}) == {"loss": None, "shape": [28, 28]}``
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return value if fits_64_bits(value) else None  # Python has no limit, but its floats and Arrow have
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has no infinity, and browsers refuse Python's
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast(dict[Any, Any], value).items()}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):  # a named tuple
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast(list[Any], value)]
    return plain(value.tolist()) if hasattr(value, "tolist") else value  # an array of numpy or torch


# Documents of JSON lines


def encode_lines(documents: Iterable[Mapping[str, Any]]) -> bytes:
    """Return ``documents`` as JSON lines; a number that is not finite becomes null."""
    return b"".join(json.dumps(plain(document), allow_nan=False).encode() + b"\n" for document in documents)


def parse_lines(parse: Callable[[dict[str, Any]], T], lines: Iterable[bytes]) -> list[T]:
    """Return the results of ``parse`` for the lines that are not damaged: see :func:`parse_line`."""
    return [row for line in lines if (row := parse_line(line, parse)) is not None]


def parse_line(line: bytes, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the result of ``parse`` for the object in a line; None if the line is damaged.

    A line also counts as damaged if ``parse`` raises KeyError, TypeError or ValueError.
    """
    with suppress(KeyError, TypeError, ValueError):
        return parse(plain(parse_object(line)))
    return None
