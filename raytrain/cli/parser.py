"""Parse a command line into a function and its arguments.

A command that trains has options that start from the defaults of a recipe. With ``--config`` they start from a file
instead, and with ``--resume`` from the stored options of the run. Only a parse finds out which file or run that is, so
the same words are parsed up to three times. What is typed wins.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from raytrain.cli.flag_rewrites import hints_of_command
from raytrain.cli.options_file import read_options_file
from raytrain.cli.tyro_parser import ALL_HELP, CONFIG_FILE, HELP, Commands, parse_words
from raytrain.config import TrainConfig
from raytrain.config.named_functions import names_own_function, stored_function_error
from raytrain.config.option_marks import Mark, Synonym
from raytrain.config.option_values import hints_of
from raytrain.config.options import marks_of, options_with
from raytrain.errors import UsageError, flag
from raytrain.recipes import AUTO, CUSTOM, RECIPES
from raytrain.runs.documents import CONFIG, open_run, read_config, run_store
from raytrain.runs.outcome import as_tuple

T = TypeVar("T")

_FLAGS_OF_ALL = ("--json", "--debug")
_FLAGS_OF_COMMANDS = (*_FLAGS_OF_ALL, "--trust", "--watch")


def parse(argv: Sequence[str], commands: Commands[T]) -> functools.partial[T]:
    """Return the command that ``argv`` names, bound to its arguments; call the result to run it.

    Each command is a function whose annotated parameters are its arguments. A parameter ``config``, a TrainConfig,
    becomes the choice of a recipe with all its options. Raises UsageError for a mistake in the words, in the file that
    ``--config`` names, or in what the options are together; StorageError if that file, or the run that ``--resume``
    continues, cannot be read; and SystemExit after ``--help``, which is printed.

    Example: ``parse(["train", "cifar10", "--epochs", "3"], {"train": train})()``
    """
    _refuse_empty(argv)
    words = _words_of_command(argv, commands)
    recipes = {name: recipe() for name, recipe in RECIPES.items()}
    names_typed = _typed_options(argv)

    def with_recipe(recipe: str) -> list[str]:
        return [recipe if word is None else word for word in words]

    # First, the options start from the defaults of the recipe.
    command = parse_words(with_recipe(_default_recipe(has_loop="loop" in names_typed)), commands, recipes)
    typed = command.keywords.get("config")
    if typed is None:
        return command
    recipe = typed["recipe"] if None not in words else None  # the one that was typed, if any

    def parse_from(config: TrainConfig, values: Mapping[str, Any]) -> functools.partial[T]:
        """Parse the same words once more: options that they lack are those in ``values``, or else of ``config``."""
        start = SimpleNamespace(**{**vars(config), **values})
        parsed = parse_words(with_recipe(config.recipe), commands, {**recipes, config.recipe: start})
        del parsed.keywords["config"][CONFIG_FILE]
        return parsed

    # With --config, parse again: options that were not typed start from the file.
    values: Mapping[str, Any] = {}  # the options in the file
    if (place := typed.pop(CONFIG_FILE)) is not None:
        file = read_options_file(place)
        if None not in (recipe, file.recipe) and recipe != file.recipe:
            raise UsageError(
                f"{place} is for the recipe {file.recipe}, and the command for {recipe}; leave one of them out."
            )
        recipe, values = file.recipe or recipe, file.values
        has_loop = "loop" in names_typed or bool(values.get("loop"))
        command = parse_from(recipes[recipe or _default_recipe(has_loop=has_loop)], values)
        if file.is_foreign and not command.keywords.get("trust"):
            _refuse_untyped_functions(typed, command.keywords["config"], place)
        typed = command.keywords["config"]

    # With --resume, parse again: options that were neither typed nor in the file start from those of the run. Those of
    # the file count as typed from now on, because a stranger's file has been checked above. With --data, --resume may
    # also start a run that does not exist yet.
    asks_to_resume = typed["resume"] and typed["name"]
    if asks_to_resume and (not typed["data"] or run_store(typed["storage"], typed["name"]).exists(CONFIG)):
        command = parse_from(_stored_options(command.func.__name__, typed, recipe, recipes), values)
        resumed = command.keywords["config"]
        if not command.keywords.get("trust"):
            _refuse_untyped_functions(typed, resumed, f"{resumed['storage']}/{resumed['name']}/{CONFIG}")

    # An option that somebody has given is no longer left to the images.
    options = command.keywords["config"]
    options["open_options"] = tuple(name for name in options["open_options"] if name not in {*names_typed, *values})
    command.keywords["config"] = TrainConfig(**options)
    return command


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise UsageError if a word, or the value in ``--option=value``, is empty; only that of --note may be.

    An empty word is mostly a shell variable that is not set.
    """
    for previous, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if not word or (word.startswith("--") and equals and not value):
            option = name or (previous if previous.startswith("--") else "an argument")
            if option != "--note":
                raise UsageError(f"The value of {option} is empty; give one, or leave it out.")


def _words_of_command(argv: Sequence[str], commands: Commands[T]) -> list[str | None]:
    """Return the words of ``argv``, the command first, with None in the place of a missing recipe.

    Example: ``_words_of_command(["train", "--data", "X"], commands) == ["train", None, "--data", "X"]``
    """
    # The flags that all commands have may come first, as in `--json train`; they go behind the command.
    words = [*argv]
    command_at = next((index for index, word in enumerate(words) if word not in _FLAGS_OF_ALL), len(words))
    if command_at < len(words) and not words[command_at].startswith("-"):
        words.insert(0, words.pop(command_at))

    # A recipe is missing if the command takes one, and a flag is where it would be. After --help none is inserted, so
    # that the help lists all recipes.
    if len(words) < 2 or words[0] not in commands or "config" not in hints_of_command(commands[words[0]]):
        return [*words]
    recipe_at = next((index for index, word in enumerate(words[1:], 1) if word not in _FLAGS_OF_COMMANDS), len(words))
    is_missing = recipe_at < len(words) and words[recipe_at].startswith("--")
    is_help = is_missing and words[recipe_at] in (*HELP, ALL_HELP)
    return [*words[:recipe_at], None, *words[recipe_at:]] if is_missing and not is_help else [*words]


def _default_recipe(*, has_loop: bool) -> str:
    """Return the recipe of a command line without one: auto, or custom with a loop of the user's own.

    auto would also choose the network and the learning rate, on which such a loop has decided.
    """
    return CUSTOM if has_loop else AUTO


def _typed_options(words: Sequence[str]) -> set[str]:
    """Return the names of the options whose flags, in any spelling, are among the words of a command line."""
    option_of_flag: dict[str, str] = {}
    for name, hint in hints_of(TrainConfig).items():
        option_of_flag[flag(name)] = name
        option_of_flag[flag(name).replace("--", "--no-", 1)] = name
        option_of_flag |= {mark.flag: name for mark in marks_of(hint) if isinstance(mark, Synonym)}
    flags = (word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    return {option_of_flag[word] for word in flags if word in option_of_flag}


def _stored_options(
    command: str, typed: Mapping[str, Any], recipe: str | None, defaults: Mapping[str, TrainConfig]
) -> TrainConfig:
    """Return the stored options of the run to resume; those that each attempt decides anew have the recipe's defaults.

    ``typed`` has the run's name and storage. ``recipe`` is the one that was typed or that a file of options names, if
    any, and ``defaults`` are the options of all recipes by name. Raises UsageError, whose sentence has the name of the
    ``command``, if the run was started from another recipe, or from one that does not exist.
    """
    name = typed["name"]
    stored = read_config(open_run(typed["storage"], name))
    if stored.recipe not in defaults:
        raise UsageError(
            f"Run {name!r} was started as {stored.recipe}, a recipe that this version of raytrain does not have; "
            f"continue with the version that `raytrain show {name}` names."
        )
    if recipe not in (None, stored.recipe):
        raise UsageError(
            f"Run {name!r} was started as {stored.recipe}, not as {recipe}; "
            f"continue with `raytrain {command} {stored.recipe} …`."
        )
    machines = {name: getattr(defaults[stored.recipe], name) for name in options_with(Mark.DECIDED_ANEW)}
    return dataclasses.replace(stored, **machines, storage=typed["storage"], resume=False)


def _refuse_untyped_functions(typed: Mapping[str, Any], started: Mapping[str, Any], document: str) -> None:
    """Raise UsageError if the command would run a function that the user has not typed, but that ``document`` names.

    ``typed`` are the options as typed, and ``started`` those with which the command would start: whoever can write the
    document could run any code in them.
    """
    for option in options_with(Mark.OWN_CODE):
        untyped = set(as_tuple(started[option])) - set(as_tuple(typed[option]))
        for name in map(str, untyped):
            if names_own_function(name):
                raise stored_function_error(option, name, document, may_be_named=True)


def config_file_of(words: Sequence[str]) -> str | None:
    """Return the file that ``--config`` names in the words of a command; None if they name none.

    Example: ``config_file_of(["train", "--config", "run.yaml"]) == "run.yaml"``
    """
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--config":
            return value if equals else following
    return None
