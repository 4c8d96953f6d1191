"""From the words of a command line to a function with its arguments, and from the parser's complaints to one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, Union, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Suppress, subcommand

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.recipes import RECIPES

C = TypeVar("C")
T = TypeVar("T")

_MARKERS = (
    tyro.conf.CascadeSubcommandArgs,
    tyro.conf.DisallowNone,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.PositionalMetavarFromFieldName,
)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(TrainConfig):
    """The options of a run as they were typed: TrainConfig checks them, so that what is wrong is said in its words."""

    recipe: Suppress[str] = "custom"

    def __post_init__(self) -> None:
        """Leave the checks to TrainConfig."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions(RecipeOptions):
    """The options that the runs of a study share: how many workers each has, and whether it is resumed, is the study's own affair."""

    name: str | None = None
    """Name of the study, whose runs are NAME-1, NAME-2 …, after their workers; by default the recipe's name and -study."""
    workers: Suppress[int | str] = "auto"
    worker_load: Suppress[tuple[float, ...] | None] = None
    resume: Suppress[bool] = False


def parse(argv: Sequence[str], commands: Mapping[str, Callable[..., T]]) -> Callable[[], T]:
    """The one of ``commands`` that ``argv`` asks for, with its arguments bound: call it to run it.

    Each command is a function whose annotated parameters are its arguments; a parameter of type RecipeOptions, or of a kind of
    them, becomes the choice of a recipe with all its options. Raises UsageError, or SystemExit after ``--help``.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            invocation = tyro.cli(_Invocation[_commands(argv, commands)], prog="raytrain", args=list(argv), config=_MARKERS)
    except SystemExit as end:
        if end.code:
            raise UsageError(_one_sentence(said.getvalue())) from None
        raise
    return invocation.command


@dataclass(frozen=True)
class _Invocation(Generic[C]):
    """Train image classifiers on all your GPUs with your own loop, straight from S3."""

    command: C
    json: FlagCreatePairsOff[bool] = False
    """Print one JSON object as the last line of standard output."""
    debug: FlagCreatePairsOff[bool] = False
    """Show the traceback of an error; RAYTRAIN_DEBUG=1 does too."""


def _commands(argv: Sequence[str], commands: Mapping[str, Callable[..., Any]]) -> Any:
    """The choice of commands, as a type."""
    chosen = _named("command", commands, argv[:1])
    return _choice(subcommand(name, constructor=_bound(command, argv)) for name, command in chosen.items())


def _recipes(argv: Sequence[str], options: type[RecipeOptions]) -> Any:
    """The choice of recipes, as a type; each comes with ``options``."""
    chosen = _named("recipe", RECIPES, argv[1:2])
    begins = {name: _begun(argv, recipe()) if options is RecipeOptions else recipe() for name, recipe in chosen.items()}
    return _choice(
        subcommand(name, default=options(**vars(begins[name])), constructor=options, description=recipe.__doc__)
        for name, recipe in chosen.items()
    )


def _begun(argv: Sequence[str], recipe: TrainConfig) -> TrainConfig:
    """The options that a run to be resumed was begun with, but for where it trains; the recipe's for a new run."""
    if "--resume" not in argv or (name := _value(argv, "--name")) is None:
        return recipe
    from raytrain.runs import records  # not above: a new run needs no storage to be parsed

    begun = records.read_config(records.open_run(_value(argv, "--storage") or recipe.storage, name))
    if begun.recipe != recipe.recipe:
        raise UsageError(
            f"Run {name!r} was begun as {begun.recipe}, not as {recipe.recipe}; go on with `raytrain {argv[0]} {begun.recipe} …`."
        )
    return dataclasses.replace(begun, workers=recipe.workers, worker_load=None, device=recipe.device, gpus=None, address=None, resume=False)


def _value(argv: Sequence[str], option: str) -> str | None:
    """What follows ``option``, before there is a parser to ask."""
    return next((value for word, value in itertools.pairwise([*argv, ""]) if word == option), None)


def _named(kind: str, there_are: Mapping[str, T], words: Sequence[str]) -> Mapping[str, T]:
    """What the first of ``words`` names (the parser need not know of the others), or all where an option or nothing comes first."""
    if not words or words[0].startswith("-"):
        return there_are
    if words[0] not in there_are:
        alike = difflib.get_close_matches(words[0], there_are, 1)
        hint = f"did you mean {alike[0]}?" if alike else f"there are {', '.join(there_are)}."
        raise UsageError(f"There is no {kind} {words[0]!r}; {hint}")
    return {words[0]: there_are[words[0]]}


def _choice(subcommands: Iterable[Any]) -> Any:
    """The union of ``subcommands``; what is suppressed in it keeps a union of one a union."""
    return Union[(*(Annotated[Any, one] for one in subcommands), Annotated[None, Suppress])]


def _bound(command: Callable[..., Any], argv: Sequence[str]) -> Callable[..., Any]:
    """What the parser calls in place of ``command``, with its arguments: the command runs later, out of the parser's hands."""

    def bind(**arguments: Any) -> Callable[[], Any]:
        return functools.partial(command, **arguments)

    bind.__doc__ = command.__doc__
    bind.__signature__ = inspect.signature(command)  # pyright: ignore[reportFunctionMemberAccess]
    hints = get_type_hints(command, include_extras=True)
    bind.__annotations__ = {name: _recipes(argv, hint) if _is_options(hint) else hint for name, hint in hints.items()}
    return bind


def _is_options(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, RecipeOptions)


def _one_sentence(box: str) -> str:
    """The parser's complaint, the first part of a box of text, without its frame and its list of all that looks alike."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()]
    after_title = itertools.islice(itertools.dropwhile(_not_edge, lines), 1, None)
    complaint = " ".join(filter(None, itertools.takewhile(_not_edge, after_title)))
    unknown = re.match(r"Unrecognized options: (--[\w-]+)", complaint)
    known = [line.split()[0] for line in lines if line.startswith("--") and _not_edge(line)]
    alike = difflib.get_close_matches(unknown[1], known, 1) if unknown else []
    return complaint.rstrip(".") + (f"; did you mean {alike[0]}?" if alike else ".")


def _not_edge(line: str) -> bool:
    return not re.match(r"[╭╰]|[─-]+$", line)
