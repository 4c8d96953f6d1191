"""Parses a command line into a function and its arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TextIO, TypeVar, Union, cast, get_args, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Suppress, arg, subcommand
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from raytrain.cli.parse_errors import NONE, as_usage_errors
from raytrain.config import SECTIONS, TrainConfig
from raytrain.config.user_code import names_own_function, stored_function_error
from raytrain.errors import UsageError, did_you_mean, flag
from raytrain.recipes import RECIPES
from raytrain.runs.documents import CONFIG, open_run, read_config, run_store
from raytrain.runs.outcome import DECIDED_ANEW, OWN_CODE, as_tuple

C = TypeVar("C")
T = TypeVar("T")
Commands = Mapping[str, Callable[..., T]]

_MARKERS = (
    tyro.conf.CascadeSubcommandArgs,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.PositionalMetavarFromFieldName,
)
_CONSTRUCTORS = ConstructorRegistry()
_PLAIN_DEFAULTS = ("", "''", NONE, "False")
"""Defaults that the help does not show, since they only say that an option was not given."""
_SYNONYMS = {"learning_rate": "--lr", "batch_size": "--bs", "weight_decay": "--wd"}
"""What people type who come from other trainers."""
_MOSTLY_USED = (
    *("data", "test_data", "labels", "name", "storage", "resume", "loop", "epochs", "batch_size", "learning_rate"),
    *("schedule", "optimizer", "workers", "device", "backend", "model", "weights", "image_size", "flip", "until"),
)
"""The options that the help shows, unless all are asked for."""
_FLAGS_OF_COMMANDS = ("--json", "--debug", "--trust", "--watch")
_HELP = ("-h", "--help")
_ALL_HELP = "--help-all"


@_CONSTRUCTORS.primitive_rule  # pyright: ignore[reportUnknownMemberType]
def _none_rule(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """Every option that may be None takes the word none, in any case; tyro itself knows only ``None``."""
    if type_info.type is not type(None):  # pyright: ignore[reportUnknownMemberType]
        return None
    return PrimitiveConstructorSpec(1, NONE, _none, lambda value: value is None, lambda value: [NONE])


def _none(words: list[str]) -> None:
    if words[0].lower() != NONE:
        raise ValueError(f"{words[0]!r} is not {NONE}")


@dataclass(frozen=True)
class Without:
    """Marks the TrainConfig of a command that decides itself on the options with these names: they have no flags."""

    names: tuple[str, ...]


def parse(argv: Sequence[str], commands: Commands[T]) -> functools.partial[T]:
    """The command that ``argv`` names, bound to its arguments; call the result to run it.

    Each command is a function whose annotated parameters are its arguments. A parameter ``config``, a TrainConfig,
    becomes the choice of a recipe with all its options. Raises UsageError, or SystemExit after ``--help``.
    """
    defaults = {name: recipe() for name, recipe in RECIPES.items()}
    place = _place_of_missing_recipe(argv, commands)
    argv = list(argv) if place is None else [*argv[:place], "custom", *argv[place:]]
    command = _parse(argv, commands, defaults)
    typed = command.keywords.get("config")
    if typed is None:
        return command
    if typed["resume"] and typed["name"] and not _starts_here(typed):
        # A second time: what was not typed is now as the run has it, and no longer as the recipe has it.
        recipe = None if place is not None else typed["recipe"]
        stored = _stored_options(command.func.__name__, typed, recipe, defaults)
        if place is not None:
            argv[place] = stored.recipe
        command = _parse(argv, commands, {**defaults, stored.recipe: stored})
        if not command.keywords.get("trust"):
            _check_functions(typed, command.keywords["config"])
    command.keywords["config"] = TrainConfig(**command.keywords["config"])
    return command


_Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]


@dataclass(frozen=True)
class _CommandLine(Generic[C]):
    """Train image classifiers on all your GPUs with your own loop, straight from S3; --version prints the version."""

    command: C
    json: _Flag = False
    """Print one JSON object as the last line of standard output."""
    debug: _Flag = False
    """Show the traceback of an error; RAYTRAIN_DEBUG=1 does the same."""


def _parse(argv: Sequence[str], commands: Commands[T], defaults: Mapping[str, TrainConfig]) -> functools.partial[T]:
    """Parse once; the options of each recipe start from its ``defaults``, and are not checked yet."""
    is_short, is_help = (not {*words}.isdisjoint(argv) for words in (_HELP, (*_HELP, _ALL_HELP)))
    argv = [_HELP[0] if word == _ALL_HELP else word for word in argv]
    chosen = _chosen("command", commands, argv[:1])
    has_recipe = len(chosen) == 1 and all("config" in _hints(command) for command in chosen.values())
    recipes = _chosen("recipe", defaults, argv[1:2]) if has_recipe else defaults
    about = _summary if len(chosen) > 1 else _description
    is_open = has_recipe and len(recipes) > 1
    more = f"\n\nWithout a recipe, it is custom; see raytrain {argv[0]} custom --help." if is_open else ""
    choice = _choice(
        subcommand(name, constructor=_bound(command, recipes, is_short), description=about(command) + more)
        for name, command in chosen.items()
    )
    flags = (flag(name) for command in chosen.values() for name in _option_names(command))
    output = cast("TextIO", _WrappedOutput(sys.stdout)) if is_help else sys.stdout
    with as_usage_errors(flags), redirect_stdout(output):
        line = tyro.cli(_CommandLine[choice], prog="raytrain", args=argv, config=_MARKERS, registry=_CONSTRUCTORS)
    return line.command


class _WrappedOutput:
    """Standard output while tyro prints help: it wraps what tyro does not, the usage and the description."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._width = shutil.get_terminal_size().columns

    def __getattr__(self, name: str) -> Any:  # tyro asks for its encoding, and whether it is a terminal
        return getattr(self._output, name)

    def write(self, text: str) -> int:
        """Write lines, none wider than the terminal."""
        return self._output.write("\n".join(map(self._wrapped, text.split("\n"))))

    def _wrapped(self, line: str) -> str:
        plain = re.sub(r"\x1b\[[\d;]*m", "", line)
        if len(plain) <= self._width:
            return line
        words = plain.replace(",", ", ") if plain.endswith("}") else plain  # the names of all recipes
        return textwrap.fill(words, self._width, break_on_hyphens=False)


def _chosen(kind: str, known: Mapping[str, T], words: Sequence[str]) -> Mapping[str, T]:
    """The one of ``known`` that ``words`` names; all of them if no word or a flag is there instead of a name."""
    if not words or words[0].startswith("-"):
        return known
    if words[0] not in known:
        hint = did_you_mean(words[0], known)
        if kind == "recipe" and ("://" in words[0] or os.path.isdir(words[0])):
            hint = f" (images are given as --data {words[0]})"
        raise UsageError(f"There is no {kind} {words[0]!r}{hint}; the {kind}s are {', '.join(known)}.")
    return {words[0]: known[words[0]]}


def _place_of_missing_recipe(argv: Sequence[str], commands: Commands[T]) -> int | None:
    """Where the recipe is missing, as in ``train --data X``; None if there is one, or the command has none."""
    if len(argv) < 2 or argv[0] not in commands or "config" not in _hints(commands[argv[0]]):
        return None
    place = next((place for place, word in enumerate(argv[1:], 1) if word not in _FLAGS_OF_COMMANDS), len(argv))
    is_option = place < len(argv) and argv[place].startswith("--") and argv[place] not in (*_HELP, _ALL_HELP)
    return place if is_option else None


# What tyro calls, and what the help shows.


def _choice(subcommands: Iterable[Any]) -> Any:
    """The union of ``subcommands`` as tyro takes it; the hidden None keeps a union of one a union."""
    return Union[(*(Annotated[Any, each] for each in subcommands), Annotated[None, Suppress])]


def _bound(
    command: Callable[..., T], recipes: Mapping[str, TrainConfig], is_short: bool
) -> Callable[..., functools.partial[T]]:
    """The function that tyro calls instead of ``command``, whose ValueError it would take for a mistake in options."""

    def bind(**arguments: Any) -> functools.partial[T]:
        return functools.partial(command, **arguments)

    bind.__signature__ = inspect.signature(command)  # pyright: ignore[reportFunctionMemberAccess]
    bind.__annotations__ = {
        name: _parameter(name, hint, command, recipes, is_short) for name, hint in _hints(command).items()
    }
    return bind


def _parameter(
    name: str, hint: Any, command: Callable[..., Any], recipes: Mapping[str, TrainConfig], is_short: bool
) -> Any:
    """A parameter of a command as tyro takes it: a choice of recipes, a section of options, or one option."""
    if name == "config":
        return _choice(
            subcommand(
                recipe,
                constructor=_options(config, _hidden(hint, is_short)),
                description=_about_recipe(recipe, command, recipes, is_short),
            )
            for recipe, config in recipes.items()
        )
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        section: type[Any] = hint
        return _section(section, section(), ())
    return _shown(hint)


def _hints(command: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(command, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _options(defaults: TrainConfig, hidden: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """The function that tyro calls with the sections of a recipe's options. It gives all options in one dict."""

    def merge(**sections: object) -> dict[str, Any]:
        return {name: value for section in sections.values() for name, value in vars(section).items()}

    types = {name: _section(section, defaults, hidden) for name, section in SECTIONS.items()}
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=types[name]) for name in types]
    merge.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    merge.__annotations__ = types
    return merge


def _section(section: Any, defaults: object, hidden: Sequence[str]) -> type:
    """A section of the options, with these defaults, as the help shows it."""
    hints = get_type_hints(section, include_extras=True)
    fields = [
        (
            name,
            Suppress[hint] if name in hidden else _shown(hint, name),
            dataclasses.field(default=getattr(defaults, name)),
        )
        for name, hint in hints.items()
    ]
    return dataclasses.make_dataclass(section.__name__, fields, bases=(section,), frozen=True, kw_only=True)


def _shown(hint: Any, name: str = "") -> Any:
    """An annotation as the help shows it: without the word none, and without a default that says nothing."""
    aliases = [_SYNONYMS[name]] if name in _SYNONYMS else None

    def default(label: str) -> str:
        return "" if label in _PLAIN_DEFAULTS else f"(default: {label})"

    return Annotated[hint, arg(metavar=_metavar(hint), help_behavior_hint=default, aliases=aliases)]


def _metavar(hint: Any) -> str | None:
    """The form of an option's values: the text in its annotation, or its type, if it may only be none besides."""
    forms = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    bare = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    kinds = [getattr(kind, "__origin__", kind) for kind in get_args(bare) if kind is not type(None)]
    if type(None) in get_args(bare) and len(kinds) == 1 and kinds[0] in (int, float, str):
        forms.append(kinds[0].__name__.upper())
    return forms[0] if forms else None


def _hidden(hint: Any, is_short: bool = False) -> tuple[str, ...]:
    """The options that have no flag in a command whose ``config`` is annotated so, or that a short help leaves out."""
    if is_short:
        return (
            *_hidden(hint),
            *(field.name for field in dataclasses.fields(TrainConfig) if field.name not in _MOSTLY_USED),
        )
    marks = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Without)]
    return ("recipe", *(name for mark in marks for name in mark.names))


def _description(command: Callable[..., Any]) -> str:
    """What the help of a command says of it: its docstring, with an example."""
    return inspect.getdoc(command) or ""


def _summary(command: Callable[..., Any]) -> str:
    """What a list of commands says of one: the first paragraph of its docstring."""
    return _description(command).partition("\n\n")[0]


def _about_recipe(name: str, command: Callable[..., Any], recipes: Mapping[str, TrainConfig], is_short: bool) -> str:
    """What a list of recipes says of one and, if it is chosen, the command's example with this recipe."""
    example = _description(command).partition("\n\n")[2].replace("cifar10", name)
    more = f"\n\nThe options that most people use; {_ALL_HELP} shows all {len(dataclasses.fields(TrainConfig))}."
    return _summary(RECIPES[name]) + (f"\n\n{example}{more * is_short}" if len(recipes) == 1 else "")


def _option_names(command: Callable[..., Any]) -> Iterator[str]:
    """The options that have a flag, those of every command included."""
    yield from ("json", "debug")
    for name, hint in _hints(command).items():
        section = TrainConfig if name == "config" else hint
        if dataclasses.is_dataclass(section):
            yield from (field.name for field in dataclasses.fields(section) if field.name not in _hidden(hint))
        else:
            yield name


# A resumed run.


def _starts_here(typed: Mapping[str, Any]) -> bool:
    """Whether there is no run to resume, and the command has --data, which nobody types who resumes a run."""
    return bool(typed["data"]) and not run_store(typed["storage"], typed["name"]).exists(CONFIG)


def _stored_options(
    command: str, typed: Mapping[str, Any], recipe: str | None, defaults: Mapping[str, TrainConfig]
) -> TrainConfig:
    """The stored options of the run to resume, but for where it trains; ``recipe`` is what was typed."""
    stored = read_config(open_run(typed["storage"], typed["name"]))
    if recipe not in (None, stored.recipe) or stored.recipe not in defaults:
        raise UsageError(
            f"Run {typed['name']!r} was started as {stored.recipe}, not as {recipe or 'custom'}; "
            f"continue with `raytrain {command} {stored.recipe} …`."
        )
    machines = {name: getattr(defaults[stored.recipe], name) for name in DECIDED_ANEW}
    return dataclasses.replace(stored, **machines, storage=typed["storage"], resume=False)


def _check_functions(typed: Mapping[str, Any], resumed: Mapping[str, Any]) -> None:
    """Raise UsageError if a function would run that was not typed: one that only the stored options name."""
    for option in OWN_CODE:
        for name in map(str, set(as_tuple(resumed[option])).difference(as_tuple(typed[option]))):
            if names_own_function(name):
                document = f"{resumed['storage']}/{resumed['name']}/{CONFIG}"
                raise stored_function_error(option, name, document, may_be_named=True)
