"""The parser of one command line, which tyro makes from a function's annotations, and the help that it prints.

Each command is a plain function. What tyro lacks stands here: sections of options as dataclasses whose defaults are
those of a recipe, made for one parse; a help that hides what few people use; and a start at once, for which tyro gets
only the command and the recipe that are chosen.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TextIO, TypeVar, Union, cast, get_args, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, Suppress, arg, subcommand
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from raytrain.cli.flag_rewrites import complete_switches, hints_of_command, join_repeated
from raytrain.cli.parse_errors import NONE, ParseErrors, how_given
from raytrain.config import SECTIONS, TrainConfig
from raytrain.config.option_marks import Mark, Synonym
from raytrain.config.options import marks_of, options_with
from raytrain.errors import UsageError, did_you_mean, flag
from raytrain.recipes import AUTO, CUSTOM, RECIPES

C = TypeVar("C")
T = TypeVar("T")
Commands = Mapping[str, Callable[..., T]]

HELP = ("-h", "--help")
ALL_HELP = "--help-all"
CONFIG_FILE = "config_file"
"""The key of the file that ``--config`` names, among the options that :func:`parse_words` returns."""
_MARKERS = (
    tyro.conf.CascadeSubcommandArgs,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.PositionalMetavarFromFieldName,
)
_CONSTRUCTORS = ConstructorRegistry()
_PLAIN_DEFAULTS = ("", "''", NONE, "False")
"""Defaults that the help does not show, since they only say that an option was not given."""


@_CONSTRUCTORS.primitive_rule  # pyright: ignore[reportUnknownMemberType]
def _none_rule(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """Make every option that may be None take the word none, in any case; tyro itself knows only ``None``."""
    if type_info.type is not type(None):  # pyright: ignore[reportUnknownMemberType]
        return None

    def parse_none(words: list[str]) -> None:
        if words[0].lower() != NONE:
            raise ValueError(f"{words[0]!r} is not {NONE}")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=NONE,
        instance_from_str=parse_none,
        is_instance=lambda value: value is None,
        str_from_instance=lambda value: [NONE],
    )


@dataclass(frozen=True)
class Without:
    """Annotates the ``config`` of a command that sets the options with ``mark`` itself: they get no flags there."""

    mark: Mark


_Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]


@dataclass(frozen=True)
class _CommandLine(Generic[C]):
    """Train image classifiers on all your GPUs with your own loop, straight from S3; --version prints the version."""

    command: C
    json: _Flag = False
    """Print one JSON object as the last line of standard output."""
    debug: _Flag = False
    """Show the traceback of an error; RAYTRAIN_DEBUG=1 does the same."""


def parse_words(argv: Sequence[str], commands: Commands[T], defaults: Mapping[str, Any]) -> functools.partial[T]:
    """Return the command bound to its arguments; print its help and raise SystemExit if ``argv`` asks for that.

    The argument ``config``, if there is one, is a dict of options, which are not checked together yet. The options of
    each recipe start from its ``defaults``. Raises UsageError for a mistake in the words.
    """
    # tyro's help shows all options, as --help-all should; with --help, those that few people use are hidden from tyro.
    is_short = any(word in HELP for word in argv)
    is_help = is_short or ALL_HELP in argv
    argv = [HELP[0] if word == ALL_HELP else word for word in argv]
    if named := next((commands[word] for word in argv if word in commands), None):
        argv = join_repeated(argv, named)
    argv = complete_switches(argv)

    # tyro gets only the command and the recipe that the first words name: all of them would delay each command.
    chosen = _only_named("command", commands, argv[:1])
    has_recipe = len(chosen) == 1 and all("config" in hints_of_command(command) for command in chosen.values())
    recipes = _only_named("recipe", defaults, argv[1:2]) if has_recipe else defaults
    help_text = _summary if len(chosen) > 1 else _description
    lists_recipes = has_recipe and len(recipes) > 1
    more = (
        f"\n\nWithout a recipe, the command takes {AUTO}, or, with --loop, {CUSTOM}. Options such as --data are in the "
        f"help of a recipe: `raytrain {argv[0]} {CUSTOM} --help`."
        if lists_recipes
        else ""
    )
    choice = _choice(
        subcommand(
            name, constructor=_binder(command, recipes, is_help, is_short), description=help_text(command) + more
        )
        for name, command in chosen.items()
    )

    # What an error about an unknown flag needs: the flags that are possible here, and the commands that do have it.
    flags = [flag(name) for name in ("json", "debug", "help", *(["config"] if has_recipe else []))]
    if argv and argv[0].startswith("-"):
        flags.append(flag("version"))
    flags += [name for command in chosen.values() for name in _names_of_flags(command)]

    def commands_with(name: str) -> list[str]:
        return [other for other, command in commands.items() if name in _names_of_flags(command)]

    output = cast("TextIO", _WrappedOutput(sys.stdout, is_optional=lists_recipes)) if is_help else sys.stdout
    # What `submit` sends needs -- before it, or its options count as those of `submit`.
    sent = list(itertools.dropwhile(lambda word: word not in commands, argv[1:])) if argv[:1] == ["submit"] else []
    sent_command = [] if "--" in argv else sent
    errors = ParseErrors(argv, flags, commands_with, sent_command)
    with errors.as_usage_errors(), redirect_stdout(output):
        line = tyro.cli(_CommandLine[choice], prog="raytrain", args=argv, config=_MARKERS, registry=_CONSTRUCTORS)
    return line.command


def _names_of_flags(command: Callable[..., Any]) -> list[str]:
    """Return the flags of a command: those of its sections of options, and of its own parameters that are flags."""
    (positional,) = marks_of(Positional[str])
    flags: list[str] = []
    for name, hint in hints_of_command(command).items():
        section = TrainConfig if name == "config" else hint
        if dataclasses.is_dataclass(section):
            without_flag = _options_without_flag(hint)
            flags += [flag(field.name) for field in dataclasses.fields(section) if field.name not in without_flag]
        elif positional not in marks_of(hint):
            flags.append(flag(name))
    return flags


class _WrappedOutput:
    """Standard output while tyro prints help: wraps the usage and the description, which tyro leaves in one line.

    With ``is_optional``, the recipe is called optional. tyro calls it required, because it does not know that a command
    line without a recipe gets one.
    """

    def __init__(self, output: TextIO, *, is_optional: bool) -> None:
        self._output = output
        self._is_optional = is_optional
        self._width = shutil.get_terminal_size().columns
        self.encoding = output.encoding  # by which tyro decides whether it may draw boxes

    def isatty(self) -> bool:
        """Return True if this is a terminal, where tyro prints in colours."""
        return self._output.isatty()

    def write(self, text: str) -> int:
        """Write ``text``, its lines wrapped to the width of the terminal; a wrapped line loses its colours."""
        lines: list[str] = []
        # The two words are equally long, so the box around them keeps its shape.
        text = text.replace("(required)", "(optional)") if self._is_optional else text
        for line in text.split("\n"):
            plain = re.sub(r"\x1b\[[\d;]*m", "", line)  # without colours, which take no space
            if len(plain) > self._width:
                # The usage ends with the names of all recipes, {auto,custom,…}, between which a line may break.
                words = plain.replace(",", ", ") if plain.endswith("}") else plain
                line = textwrap.fill(words, self._width, break_on_hyphens=False)
            lines.append(line)
        return self._output.write("\n".join(lines))

    def flush(self) -> None:
        """Flush the output."""
        self._output.flush()


def _only_named(kind: str, choices: Mapping[str, T], words: Sequence[str]) -> Mapping[str, T]:
    """Return only that of ``choices``, commands or recipes as ``kind`` says, which the first of ``words`` names.

    Returns all choices if there is no word, or it is a flag. Raises UsageError if the word is no choice.
    """
    if not words or words[0].startswith("-"):
        return choices  # for the help, or for an error that names them all
    if words[0] not in choices:
        hint = did_you_mean(words[0], [*choices, *HELP])
        if kind == "recipe" and (advice := how_given(words[0])):
            hint = f" ({advice})"
        raise UsageError(f"There is no {kind} {words[0]!r}{hint}; the {kind}s are {', '.join(choices)}.")
    return {words[0]: choices[words[0]]}


# The functions and dataclasses that tyro builds its parser from.


def _choice(subcommands: Iterable[Any]) -> Any:
    """Return the union by which tyro offers a choice of ``subcommands``.

    A None that the help does not show keeps it a union if there is only one.
    """
    return Union[(*(Annotated[Any, choice] for choice in subcommands), Annotated[None, Suppress])]


def _binder(
    command: Callable[..., T], recipes: Mapping[str, Any], is_help: bool, is_short: bool
) -> Callable[..., functools.partial[T]]:
    """Return a function that binds ``command`` to its arguments, for tyro to call.

    tyro does not call the command itself, because it would take a ValueError there for a mistake in the command line.
    The annotations are those of the command in the form that tyro needs: a choice of ``recipes``, which are options by
    the names of recipes, a section of options, or one option. ``is_help``: only the help is needed. ``is_short`` leaves
    out the options that few people use.
    """

    def bind(**arguments: Any) -> functools.partial[T]:
        return functools.partial(command, **arguments)

    parameters: dict[str, Any] = {}
    for name, hint in hints_of_command(command).items():
        if name == "config":
            hidden = _options_without_flag(hint)
            num_options = None
            if is_short:
                num_options = len(dataclasses.fields(TrainConfig)) - len(hidden)
                common = options_with(Mark.COMMON)
                hidden += tuple(field.name for field in dataclasses.fields(TrainConfig) if field.name not in common)
            parameters[name] = _choice(
                subcommand(
                    recipe,
                    constructor=_section_merger(config, hidden, is_help),
                    description=_about_recipe(recipe, command, is_only=len(recipes) == 1, num_options=num_options),
                )
                for recipe, config in recipes.items()
            )
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            section: type[Any] = hint
            parameters[name] = _section_with_defaults(section, section(), (), is_help)
        else:
            parameters[name] = _annotation_for_tyro(hint)
    bind.__signature__ = inspect.signature(command)  # pyright: ignore[reportFunctionMemberAccess]
    bind.__annotations__ = parameters
    return bind


_ConfigFile = Annotated[
    str | None,
    arg(
        name="config",
        metavar="FILE",
        help_behavior_hint="",
        help="Options in a file, .yaml or .json, or a run's config.json, by path or URL; those that are typed win.",
    ),
]


def _section_merger(defaults: object, hidden: Sequence[str], is_help: bool) -> Callable[..., dict[str, Any]]:
    """Return the function that tyro calls with the sections of a recipe's options: it merges them into one dict.

    The dict also has what ``--config`` names, under ``CONFIG_FILE``. ``defaults`` has the recipe's options as
    attributes. Options in ``hidden`` get no flags. ``is_help``: only the help is needed.
    """

    def merge(config_file: str | None, **sections: object) -> dict[str, Any]:
        options = {name: value for section in sections.values() for name, value in vars(section).items()}
        return {**options, CONFIG_FILE: config_file}

    # tyro makes its parser from this signature.
    types = {name: _section_with_defaults(section, defaults, hidden, is_help) for name, section in SECTIONS.items()}
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=types[name]) for name in types]
    file = inspect.Parameter(CONFIG_FILE, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_ConfigFile)
    merge.__signature__ = inspect.Signature([file, *parameters])  # pyright: ignore[reportFunctionMemberAccess]
    merge.__annotations__ = {CONFIG_FILE: _ConfigFile, **types}
    return merge


def _section_with_defaults(section: Any, defaults: object, hidden: Sequence[str], is_help: bool) -> type:
    """Return a subclass of ``section``, a dataclass of options, from which tyro makes their flags and their help.

    ``defaults`` has the defaults as attributes of the options' names. An option in ``hidden`` has no flag and is not in
    the help; it keeps its default. ``is_help``: only the help is needed.
    """
    hints = get_type_hints(section, include_extras=True)
    # With the recipe auto, the images decide on these, so the help shows no default.
    open_options: Sequence[str] = getattr(defaults, "open_options", ())
    texts = _long_help_texts(section) if is_help else {}  # which takes some 30 ms
    fields = [
        (
            name,
            Suppress[hint]
            if name in hidden
            else _annotation_for_tyro(hint, texts.get(name), is_open=name in open_options),
            dataclasses.field(default=getattr(defaults, name)),
        )
        for name, hint in hints.items()
    ]
    return dataclasses.make_dataclass(section.__name__, fields, bases=(section,), frozen=True, kw_only=True)


@functools.cache
def _long_help_texts(section: type) -> dict[str, str]:
    """Return the help texts of ``section`` that are written in several lines, each as one line, by their options.

    tyro would begin a new line in the help at each line break of the source.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for option, docstring in itertools.pairwise(definition.body):
        match option, docstring:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))) if "\n" in text:
                texts[name] = " ".join(text.split())
            case _:
                pass
    return texts


def _annotation_for_tyro(hint: Any, text: str | None = None, *, is_open: bool = False) -> Any:
    """Return the annotation of an option for tyro, which makes its flags and its line of the help from it.

    The option gets its second flag, if it has one. The help shows the form of its values without ``none``, and its
    default unless that only says that the option was not given. ``text`` is the help, by default the docstring below
    the option. ``is_open``: the images decide on it.
    """
    # The form of the values: a text in the annotation, or else the type of an option that is a number, a text or None.
    marks = marks_of(hint)
    forms = [text for text in marks if isinstance(text, str)]
    bare = get_args(hint)[0] if marks else hint
    kinds = [getattr(kind, "__origin__", kind) for kind in get_args(bare) if kind is not type(None)]
    if type(None) in get_args(bare) and len(kinds) == 1 and kinds[0] in (int, float, str):
        forms.append(kinds[0].__name__.upper())

    def default(label: str) -> str:
        if is_open:
            return "(default: what fits the images)"
        return "" if label in _PLAIN_DEFAULTS else f"(default: {label})"

    aliases = [mark.flag for mark in marks if isinstance(mark, Synonym)] or None
    metavar = forms[0] if forms else None
    return Annotated[hint, arg(metavar=metavar, help=text, help_behavior_hint=default, aliases=aliases)]


def _options_without_flag(hint: Any) -> tuple[str, ...]:
    """Return the names of the options without a flag in a command whose ``config`` has the annotation ``hint``."""
    marks = [Mark.SUBCOMMAND, *(without.mark for without in marks_of(hint) if isinstance(without, Without))]
    return tuple(name for mark in marks for name in options_with(mark))


def _description(command: Callable[..., Any]) -> str:
    """Return the help text of a command: its docstring, with an example."""
    return inspect.getdoc(command) or ""


def _summary(command: Callable[..., Any]) -> str:
    """Return the line of a command in a list of commands: the first paragraph of its docstring."""
    return _description(command).partition("\n\n")[0]


def _about_recipe(name: str, command: Callable[..., Any], *, is_only: bool, num_options: int | None) -> str:
    """Return the line of a recipe in a list of recipes; if it is the only one, with more of the command's help.

    That is all that follows the first paragraph of the command's docstring, with this recipe in the example.
    ``num_options`` is the number of options that the command has, if the help shows only some of them; else None.
    """
    line = _summary(RECIPES[name])
    if not is_only:
        return line
    paragraphs = _description(command).partition("\n\n")[2].replace("cifar10", name)
    more = "" if num_options is None else f"\n\nThe options that most people use; {ALL_HELP} shows all {num_options}."
    return f"{line}\n\n{paragraphs}{more}"
