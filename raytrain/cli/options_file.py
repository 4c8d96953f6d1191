"""Options of a run in a file that ``--config`` names: YAML or JSON, or the ``config.json`` of a run.

A file has options by their names, with ``-`` or ``_`` between the words, and perhaps a recipe, which it starts from::

    recipe: cifar10
    data: s3://bucket/train
    learning-rate: 1e-2
    image_size: [128, 128]

Each value is checked where it is read, so that an error names the file and the line. What options allow together is
checked later, for flags of the command line may still replace some of them.

YAML is read as its version 1.2 has it: only true and false are truth values, and 1e-2 is a number. PyYAML resolves
plain words as version 1.1 does, so it only splits the file into nodes here, and this module reads the words.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from raytrain.cli.parse_errors import NONE
from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.option_values import check_limit, hints_of, matches, read_value
from raytrain.config.options import options_with, similar_options
from raytrain.errors import UsageError, did_you_mean
from raytrain.recipes import RECIPES
from raytrain.runs.documents import warn_once
from raytrain.runs.redact import is_secret_name
from raytrain.storage.open import read_input

_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_BYTES = 1_000_000
_MAX_DIGITS = 20  # of a whole number; int() refuses a text with thousands of digits
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?\d+")
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class OptionsFile:
    """The options in a file, as plain values.

    Attributes:
        place: the path or URL of the file.
        recipe: the recipe that it starts from, if it says so.
        values: its options by the names of their fields; no recipe.
        is_foreign: somebody else may have written it: it is in a bucket, or the ``config.json`` of a run.
    """

    place: str
    recipe: str | None
    values: Mapping[str, Any]
    is_foreign: bool


@dataclass(frozen=True)
class _Entry:
    """An option in a file: its ``value``, and the same as text in ``words``; ``where`` names the file and the line.

    The words are for an option whose value must be text, such as the tag 2024. ``words`` is a list of texts for a list,
    and None for a value that is not to be read as text, such as a mapping. A JSON file is named without a line.
    """

    where: str
    name: str
    value: Any
    words: Any


def read_options_file(place: str) -> OptionsFile:
    """Read the options in the file or the object of a bucket at ``place``, a path or a URL.

    The ``config.json`` of a run has all options. Only those are taken that decide what the run computes: not its name
    and storage, its description, its trackers and its machines.

    Raises StorageError if the file cannot be read. Raises UsageError, with the line or the key, if it is no file of
    options, has an option that does not exist or is given twice, or a value that the option cannot have.

    Example: ``read_options_file("run.yaml").values["epochs"]``
    """
    if not place.lower().endswith(_SUFFIXES):
        raise UsageError(f"--config is {place}; give a file of options whose name ends in {', '.join(_SUFFIXES)}.")
    content = read_input(place, "--config")
    if len(content) > _MAX_BYTES:
        raise UsageError(f"--config {place} has {len(content):,} bytes; options take a few hundred.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"--config {place} is not text in UTF-8; save it in this encoding.") from None
    try:
        entries = list(_json_entries(place, text) if place.lower().endswith(".json") else _yaml_entries(place, text))
        return _options_in(place, entries)
    except RecursionError:
        raise UsageError(f"--config {place} is nested too deeply; give options by their names.") from None


def _options_in(place: str, entries: list[_Entry]) -> OptionsFile:
    """Return the options that the file at ``place`` has as ``entries``, without those that a run decides for itself."""
    # The config.json of a run is recognised by the fields that only a resolved config has, such as its device.
    decided = {field.name for field in dataclasses.fields(ResolvedConfig) if field.default is dataclasses.MISSING}
    is_of_run = decided <= {entry.name for entry in entries}
    if is_of_run:
        marks = (Mark.DESCRIBES_RUN, Mark.OF_COMMAND, Mark.DECIDED_ANEW)
        left_out = {name for mark in marks for name in options_with(mark)}
        entries = [entry for entry in entries if entry.name not in left_out]
        # A newer version of raytrain may have written options that this one lacks.
        if unknown := [entry.name for entry in entries if entry.name not in hints_of(TrainConfig)]:
            warn_once(f"{place} has options that this version of raytrain does not know and ignores: {unknown}")
            entries = [entry for entry in entries if entry.name not in unknown]

    where_given: dict[str, str] = {}
    values: dict[str, Any] = {}
    for entry in entries:
        name = entry.name.replace("-", "_")
        if name in where_given:
            raise UsageError(f"{entry.where}: {entry.name} is given already ({where_given[name]}); remove one of them.")
        where_given[name] = entry.where
        values[name] = _value_of(entry, name)
    return OptionsFile(place, values.pop("recipe", None), values, is_foreign=is_of_run or "://" in place)


def _value_of(entry: _Entry, name: str) -> Any:
    """Return the value of the entry for the option ``name``, in plain types.

    Raises UsageError, with the place in the file, if there is no such option or it cannot have this value, and for a
    name that looks like that of a secret.
    """
    hint = hints_of(TrainConfig).get(name)
    if hint is None and is_secret_name(name):
        raise UsageError(
            f"{entry.where}: {entry.name} looks like a secret, and is not an option; keep keys in the environment or "
            "in a profile of the cloud, never in a file of options."
        )
    value: Any = entry.value
    if hint is None and isinstance(value, dict):
        names = ", ".join(cast("dict[str, Any]", value))
        raise UsageError(
            f"{entry.where}: {entry.name} is a section, and options are not divided into sections here; leave this "
            f"name out, and move what it contains to the top level: {names or 'nothing'}."
        )
    if hint is None or (name in options_with(Mark.SUBCOMMAND) and name != "recipe"):
        raise UsageError(
            f"{entry.where}: there is no option {entry.name}{similar_options(name)}; `raytrain train custom "
            "--help-all` lists all."
        )
    if name == "recipe" and str(entry.value) not in RECIPES:
        similar = did_you_mean(str(entry.value), RECIPES)
        raise UsageError(
            f"{entry.where}: there is no recipe {entry.value!r}{similar}; the recipes are {', '.join(RECIPES)}."
        )

    # As on the command line, `none` is None if the option may be None, and 128 is a text if the option must be one.
    value = None if str(entry.value).lower() == NONE and matches(None, hint) else entry.value
    if entry.words is not None and not _fits(name, value, hint) and _fits(name, entry.words, hint):
        value = entry.words
    try:
        value = read_value(name, value, hint)
        check_limit(TrainConfig, name, value)
    except UsageError as error:
        raise UsageError(f"{entry.where}: {error}") from None
    return value


def _fits(name: str, value: Any, hint: Any) -> bool:
    """Return True if the option ``name`` of the type ``hint`` can have this ``value``; a number is no text here."""
    with suppress(UsageError):
        read_value(name, value, hint, numbers_as_text=False)
        return True
    return False


class _Pairs(list[tuple[str, Any]]):
    """The names and values of a JSON object, in which a name may occur twice."""


def _json_entries(place: str, text: str) -> Iterator[_Entry]:
    """Yield the options in ``text``, a JSON object; raise UsageError for any other text. ``place`` is the file."""
    try:
        pairs = cast("list[tuple[str, Any]]", json.loads(text, object_pairs_hook=_Pairs))
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}, line {error.lineno}: this is no JSON ({error.msg}); correct it.") from None
    except ValueError:  # Python refuses to make an integer of more than 4,300 digits
        raise UsageError(f"--config {place} has a number of thousands of digits; correct it.") from None
    if not isinstance(pairs, _Pairs):
        raise UsageError(f'--config {place} is no JSON object; give options by their names, as in {{"epochs": 10}}.')
    for name, value in pairs:
        plain = _without_repetition(f"{place}: {name}", value) if isinstance(value, _Pairs) else value
        yield _Entry(place, name, plain, _json_words(plain))


def _without_repetition(where: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return ``pairs`` as a dictionary; raise UsageError, which begins with ``where``, if a name occurs twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise UsageError(f"{where}: {name!r} is given twice; remove one of them.")
        values[name] = value
    return values


def _json_words(value: Any) -> Any:
    """Return a JSON text or number as text, and a list as a list of these; None for any other value."""
    if isinstance(value, list):
        return [_json_words(item) for item in cast("list[Any]", value)]
    return str(value) if type(value) in (str, int, float) else None


def _yaml_entries(place: str, text: str) -> Iterator[_Entry]:
    """Yield the options in ``text``, a YAML mapping, with their lines; raise UsageError for any other text.

    ``place`` is the file. An empty file has no options.
    """
    import yaml  # deferred: few commands read options from a file

    try:
        root = cast(Any, yaml).compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        position, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{place}, line {position.line + 1}" if position else place
        problem = problem or "unknown characters"
        raise UsageError(
            f"{where}: this is no YAML ({problem}); write an option in each line, as in epochs: 10."
        ) from None
    if root is None:
        return
    if root.id != "mapping":
        raise UsageError(f"--config {place} has no names of options; write one in each line, as in epochs: 10.")
    for key, node in root.value:
        where = f"{place}, line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise UsageError(f"{where}: this is no name of an option; write one, as in epochs: 10.")
        yield _Entry(where, key.value, _node_value(where, node), _node_words(node))


def _node_value(where: str, node: Any) -> Any:
    """Return a node of YAML as a plain value: None, a bool, a number or a str, or a flat list or dict of these.

    Raises UsageError for a list or dict within another one, and for a name that occurs twice in a mapping. The sentence
    begins with ``where``, the file and the line.
    """
    if node.id == "sequence" and all(item.id == "scalar" for item in node.value):
        return [_node_value(where, item) for item in node.value]
    if node.id == "mapping" and all(part.id == "scalar" for pair in node.value for part in pair):
        return _without_repetition(where, ((key.value, _node_value(where, value)) for key, value in node.value))
    if node.id != "scalar":
        raise UsageError(
            f"{where}: the value is nested, and options are not divided into sections here; move them to the top level."
        )
    # What is in quotes is a str, and a plain word is what YAML 1.2 makes of it. A whole number with too many digits
    # becomes a float, which no option for whole numbers takes.
    if node.style is not None:
        return node.value
    word = node.value
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _INTEGER.fullmatch(word) and len(word) <= _MAX_DIGITS:
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word


def _node_words(node: Any) -> Any:
    """Return a node of YAML as the text in the file, and a list as a list of texts; None for a mapping."""
    if node.id == "sequence":
        return [_node_words(item) for item in node.value]
    return node.value if node.id == "scalar" else None
