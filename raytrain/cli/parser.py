"""From the words of a command line to a function with its arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, Union, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Suppress, subcommand
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from raytrain.cli.parse_errors import NONE, as_usage_errors
from raytrain.config import TrainConfig
from raytrain.config.user_function import names_own_function, stored_function_error
from raytrain.errors import UsageError, did_you_mean, flag
from raytrain.recipes import RECIPES
from raytrain.runs.layout import CONFIG

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


@_CONSTRUCTORS.primitive_rule  # pyright: ignore[reportUnknownMemberType]
def _none_rule(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """Every option that may be None takes the word none, in any case; tyro itself knows only ``None``."""
    if type_info.type is not type(None):  # pyright: ignore[reportUnknownMemberType]
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=NONE,
        instance_from_str=_none,
        is_instance=lambda value: value is None,
        str_from_instance=lambda value: [NONE],
    )


def _none(words: list[str]) -> None:
    if words[0].lower() != NONE:
        raise ValueError(f"{words[0]!r} is not {NONE}")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(TrainConfig):
    """The options of a run as they were typed, before any check."""

    recipe: Suppress[str] = "custom"

    def __post_init__(self) -> None:
        """Check nothing yet: the first of two parses may combine options that do not fit together."""

    def checked(self) -> TrainConfig:
        """The same options as a TrainConfig; raises UsageError."""
        return TrainConfig(**vars(self))


@dataclass(frozen=True, kw_only=True)
class StudyOptions(RecipeOptions):
    """The options that all runs of a study share. The study itself decides on the workers, and which runs to resume."""

    name: str | None = None
    """Name of the study, whose runs are NAME-1, NAME-2 … by their workers; by default the recipe's name and -study."""
    workers: Suppress[int | str] = "auto"
    worker_load: Suppress[tuple[float, ...] | None] = None
    resume: Suppress[bool] = False


def parse(argv: Sequence[str], commands: Commands[T]) -> functools.partial[T]:
    """The command that ``argv`` names, bound to its arguments; call the result to run it.

    Each command is a function whose annotated parameters are its arguments. A parameter of type RecipeOptions, or of a
    subclass, becomes the choice of a recipe with all its options. Raises UsageError, or SystemExit after ``--help``.
    """
    defaults = {name: recipe() for name, recipe in RECIPES.items()}
    command = _parse(argv, commands, defaults)
    options = command.keywords.get("options")
    if isinstance(options, RecipeOptions) and options.resume and options.name and not _starts_here(options):
        # A second time: what was not typed is now as the run has it, and no longer as the recipe has it.
        stored = _stored_options(command.func.__name__, options, defaults[options.recipe])
        command = _parse(argv, commands, {**defaults, options.recipe: stored})
        if not command.keywords.get("trust"):
            _check_functions(options, command.keywords["options"])
    return command


@dataclass(frozen=True)
class _CommandLine(Generic[C]):
    """Train image classifiers on all your GPUs with your own loop, straight from S3."""

    command: C
    json: FlagCreatePairsOff[bool] = False
    """Print one JSON object as the last line of standard output."""
    debug: FlagCreatePairsOff[bool] = False
    """Show the traceback of an error; RAYTRAIN_DEBUG=1 does the same."""


def _parse(argv: Sequence[str], commands: Commands[T], defaults: Mapping[str, TrainConfig]) -> functools.partial[T]:
    """Parse once; the options of each recipe start from its ``defaults``."""
    chosen = _chosen("command", commands, argv[:1])
    has_recipe = len(chosen) == 1 and all(map(_options_type, chosen.values()))
    recipes = _chosen("recipe", defaults, argv[1:2]) if has_recipe else defaults
    about = _summary if len(chosen) > 1 else _description
    choice = _choice(
        subcommand(name, constructor=_bound(command, recipes), description=about(command))
        for name, command in chosen.items()
    )
    flags = (flag(name) for command in chosen.values() for name in _option_names(command))
    with as_usage_errors(flags):
        line = tyro.cli(_CommandLine[choice], prog="raytrain", args=list(argv), config=_MARKERS, registry=_CONSTRUCTORS)
    return line.command


def _chosen(kind: str, known: Mapping[str, T], words: Sequence[str]) -> Mapping[str, T]:
    """The one of ``known`` that ``words`` names; all of them if no word or a flag is there instead of a name."""
    if not words or words[0].startswith("-"):
        return known
    if words[0] not in known:
        hint = did_you_mean(words[0], known)
        raise UsageError(f"There is no {kind} {words[0]!r}{hint}; the {kind}s are {', '.join(known)}.")
    return {words[0]: known[words[0]]}


def _starts_here(options: RecipeOptions) -> bool:
    """Whether there is no run to resume yet, and the command has what a new one needs, as a launcher's has.

    A person who resumes a run seldom types --data; one who mistypes its name should hear of it.
    """
    from raytrain.runs.documents import run_store  # deferred: a new run can be parsed without storage

    return bool(options.data) and not run_store(options.storage, options.name or "").exists(CONFIG)


def _stored_options(command: str, options: RecipeOptions, recipe: TrainConfig) -> TrainConfig:
    """The options that the run to resume was started with, except for where it trains: that is decided anew."""
    from raytrain.runs.documents import open_run, read_config  # deferred: a new run can be parsed without storage

    stored = read_config(open_run(options.storage, options.name or ""))
    if stored.recipe != options.recipe:
        raise UsageError(
            f"Run {options.name!r} was started as {stored.recipe}, not as {options.recipe}; "
            f"continue with `raytrain {command} {stored.recipe} …`."
        )
    machines = {
        name: getattr(recipe, name)
        for name in ("backend", "workers", "wait_for_machines_s", "worker_load", "device", "address")
    }
    return dataclasses.replace(stored, **machines, storage=options.storage, resume=False)


def _check_functions(typed: RecipeOptions, resumed: RecipeOptions) -> None:
    """Raise UsageError if a function would run that was not typed: one that only the stored options name."""
    for option in ("model", "loop", "transforms", "track"):
        for name in set(_names(getattr(resumed, option))) - set(_names(getattr(typed, option))):
            if names_own_function(name):
                document = f"{resumed.storage}/{resumed.name}/{CONFIG}"
                raise stored_function_error(option, name, document, may_be_named=True)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,) if value else ()


def _choice(subcommands: Iterable[Any]) -> Any:
    """The union of ``subcommands`` as tyro takes it; the hidden None keeps a union of one a union."""
    return Union[(*(Annotated[Any, each] for each in subcommands), Annotated[None, Suppress])]


def _bound(command: Callable[..., T], recipes: Mapping[str, TrainConfig]) -> Callable[..., functools.partial[T]]:
    """The function that tyro calls instead of ``command``, with the same parameters.

    The command itself runs later, because tyro reports a ValueError of what it calls as a mistake in the options.
    """

    def bind(**arguments: Any) -> functools.partial[T]:
        return functools.partial(command, **arguments)

    bind.__signature__ = inspect.signature(command)  # pyright: ignore[reportFunctionMemberAccess]
    bind.__annotations__ = dict(get_type_hints(command, include_extras=True))
    if options := _options_type(command):
        bind.__annotations__["options"] = _choice(
            subcommand(
                name,
                default=options(**vars(config)),
                constructor=options,
                description=_about_recipe(name, command, recipes),
            )
            for name, config in recipes.items()
        )
    return bind


def _description(command: Callable[..., Any]) -> str:
    """What the help of a command says of it: its docstring, with an example."""
    return inspect.getdoc(command) or ""


def _summary(command: Callable[..., Any]) -> str:
    """What a list of commands says of one: the first paragraph of its docstring."""
    return _description(command).partition("\n\n")[0]


def _about_recipe(name: str, command: Callable[..., Any], recipes: Mapping[str, TrainConfig]) -> str:
    """What a list of recipes says of one and, if it is chosen, the command's example with this recipe."""
    example = _description(command).partition("\n\n")[2].replace("cifar10", name)
    return _summary(RECIPES[name]) + (f"\n\n{example}" if len(recipes) == 1 else "")


def _options_type(command: Callable[..., Any]) -> type[RecipeOptions] | None:
    return get_type_hints(command).get("options")


def _option_names(command: Callable[..., Any]) -> Iterator[str]:
    """The fields and parameters that have a flag, those of every command included."""
    for source in filter(None, (command, _options_type(command), _CommandLine)):
        for name, hint in get_type_hints(source, include_extras=True).items():
            if name not in ("command", "options", "return") and Suppress not in getattr(hint, "__metadata__", ()):
                yield name
