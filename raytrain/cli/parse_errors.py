"""Errors of the parser as one sentence each, by a hook of tyro that gives typed events instead of a box of text.

The hook is private: pyproject.toml limits tyro to 1.0, only this file uses it, and ``tests/unit/test_parser.py`` fails
with the names that a newer tyro lacks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, get_type_hints

from tyro import _errors as events  # pyright: ignore[reportPrivateUsage]

from raytrain.config import TrainConfig
from raytrain.config.option_values import hints_of
from raytrain.config.options import option_known_as, why_needless
from raytrain.errors import UsageError, did_you_mean, flag
from raytrain.recipes import RECIPES
from raytrain.runs.documents import CONFIG

if TYPE_CHECKING:
    from tyro._arguments import ArgumentDefinition

NONE = "none"
"""The word for None as the value of an option."""
_KINDS = {"INT": "a whole number", "FLOAT": "a number", "STR": "a value"}  # by the form that the help shows
_MAX_COMMANDS = 2  # that an error names because they have an option


@dataclass(frozen=True)
class ParseErrors:
    """Makes sentences of the mistakes in the words ``argv`` of a command line.

    An unknown flag may be a misspelling of one of ``flags``, which the command has. ``commands_with`` returns the names
    of the commands that take a flag. ``sent_command`` is the command that ``submit`` got without ``--`` before it.

    Example: ``with ParseErrors(argv, ["--json"], lambda flag: []).as_usage_errors(): tyro.cli(…)``
    """

    argv: Sequence[str]
    flags: Collection[str]
    commands_with: Callable[[str], Sequence[str]]
    sent_command: Sequence[str] = ()

    @contextmanager
    def as_usage_errors(self) -> Generator[None]:
        """Have tyro raise UsageError in this context, instead of printing a box and exiting."""

        def refuse(event: events.ParseErrorEvent) -> NoReturn:
            raise UsageError(self._sentence(event))

        with events.on_parse_error(refuse):
            yield

    def _sentence(self, event: events.ParseErrorEvent) -> str:
        """Return the sentence for a mistake in a command line, which names the word or the argument."""
        if isinstance(event, events.UnrecognizedArgs):
            return self._sentence_on_unknown(event.tokens)
        if isinstance(event, events.MissingArgs):
            if event.unrecognized_tokens:  # probably the name of the missing argument, misspelt
                return self._sentence_on_unknown(event.unrecognized_tokens)
            command = f"{event.prog} {event.missing_arguments[0].source_parser.prog_suffix}".strip()
            names = " and ".join(_name(missing.arg) for missing in event.missing_arguments)
            return f"`{command}` needs {names}; see `{command} --help`."
        if isinstance(event, events.MissingSubcommand):
            names = [name for name in event.subcommand_spec.parser_from_name if name != "None"]
            if set(RECIPES) & set(names):
                return f"Images are missing: give --data FOLDER; a recipe may stand before it: {', '.join(names)}."
            return f"Choose one of {', '.join(names)}."
        if isinstance(event, events.BadValue):
            form = _form(event.argument)
            if not event.argument.is_positional():
                one_value = _KINDS.get(form)
                needed = f"{one_value} after it" if one_value else f"a value: {form.replace(',', ', ')}"
                return f"{_name(event.argument)} needs {needed}."
            # An option stands where the argument should: often its name in another command, as in `pack --data FOLDER`.
            return f"{form} is missing; it is given without an option before it, as in `{event.prog} {form}`."
        if isinstance(event, events.InvalidChoice):
            # tyro has the words of a switch, such as --compile, in no order, and among them True and False.
            choices = [word for word in event.choices if word not in ("True", "False")]
            may_stand_alone = ""
            if len(choices) < len(event.choices):
                choices.sort(key=_form(event.argument).split(",").index)
                may_stand_alone = ", or have no value"
            hint = did_you_mean(event.value.lower(), choices)
            must = f"it must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}{may_stand_alone}"
            return f"{_name(event.argument)} is {event.value!r}{hint}; {must}."
        if isinstance(event, events.InstantiationFailure) and event.argument is not None:
            # The value has the wrong type. The message ends with Python's reason: invalid literal for …: 'x'.
            name, form = _name(event.argument), _form(event.argument)
            reason = event.message.splitlines()[-1].removeprefix("- ").partition(" into tuple type ")[0]
            if "input length " in reason:
                words = re.search(r" from \[(.*)\]", event.message)
                typed = " ".join(re.findall("'(.*?)'", words[1])) if words else ""
                return f"{name} {f'is {typed!r}; it ' if typed else ''}must be {form}."
            kind = _KINDS.get(form) or ("numbers" if re.search("FLOAT|INT", form) else form)
            words = form.lower().split(",")  # which the message quotes, besides the value, if the option may be None
            typed = " ".join(word for _, word in re.findall(r"""(['"])(.*?)\1""", reason) if word not in words)
            return f"{name} is {typed!r}; it must be {kind.replace(',', ', ')}."
        return f"The options are not understood ({type(event).__name__}); see `{event.prog} --help`."

    def _sentence_on_unknown(self, words: Sequence[str]) -> str:
        """Return the sentence about the first of the unknown ``words``; the others may be its values."""
        word = words[0]
        name = word.partition("=")[0]
        if word in self.sent_command:
            command = self.sent_command[0]
            shown = command if name == command else f"{command} {name}"
            return (
                f"{name} belongs to the command that is sent, which needs -- before it: `raytrain submit -- {shown} …`."
            )
        if word in RECIPES:
            return f"{word} is a recipe, which comes first, as in `raytrain train {word} --data FOLDER`."

        # A word that is no flag.
        if not word.startswith("-"):
            advice = f"`raytrain {self.argv[0]} --help` says what it takes, and a value with spaces needs quotes"
            if "--data" in self.flags and os.path.isfile(os.path.join(word, CONFIG)):
                storage, _, run = word.rstrip("/").rpartition("/")
                advice = f"a run is given as {shlex.join(['--name', run, '--storage', storage or '.'])}"
            elif switch := self._switch_with(word):
                return f"{switch} takes no value such as {word}; write {switch} or {switch.replace('--', '--no-', 1)}."
            elif folder := _folder_of_several(self.argv, word):
                option, path = folder
                advice = f"{option} takes one folder, with all images below it, such as {option} {shlex.quote(path)}"
            elif "--data" in self.flags:
                advice = how_given(word) or advice
            return f"There is one argument too many: {word!r}; {advice}."

        # A flag: of another command, of another trainer, or misspelt.
        option = option_known_as(name.removeprefix("--")) or name.removeprefix("--").replace("-", "_")
        begun = {known for known in self.flags if known.startswith(name)}  # `export --out` is --output
        meant = begun.pop() if len(begun) == 1 else flag(option)
        commands = self.commands_with(name)
        if name in self.flags and commands:  # the flag stands before its command: `raytrain --data photos train`
            command = "train" if "train" in commands else commands[0]
            return f"{name} is an option of a command, which comes first, as in `raytrain {command} {name} …`."
        if 0 < len(commands) <= _MAX_COMMANDS:
            owners = " and ".join(f"`raytrain {command}`" for command in commands)
            return f"There is no option {name} here; {owners} {'has' if len(commands) == 1 else 'have'} it."
        if "--data" in self.flags and (reason := why_needless(name.removeprefix("--"))):
            return f"There is no option {name}: {reason}."
        if "--config" in self.flags and option in hints_of(TrainConfig) and meant not in self.flags:
            return f"`raytrain {self.argv[0]}` takes no {meant}: it sets that itself, or does without; leave it out."
        hint = f" (did you mean {meant}?)" if meant in self.flags else did_you_mean(name, self.flags)
        return f"There is no option {name}{hint}."

    def _switch_with(self, word: str) -> str | None:
        """Return the switch that got ``word`` as a value, as in ``--nesterov true`` or ``--nesterov=true``, or None."""
        switches = {flag(name) for name, hint in get_type_hints(TrainConfig).items() if hint is bool} & {*self.flags}
        for typed, following in zip(self.argv, [*self.argv[1:], ""], strict=True):
            name, equals, value = typed.partition("=")
            switch = name.replace("_", "-")
            if switch in switches and (value if equals else following) == word:
                return switch
        return None


def _name(argument: ArgumentDefinition) -> str:
    """Return what a sentence calls an argument: its flag, or the form of its values if it has no flag."""
    return _form(argument) if argument.is_positional() else argument.display_name()


def _form(argument: ArgumentDefinition) -> str:
    """Return the form of an argument's values, as the help shows it: ``INT INT``."""
    return re.sub("[{}]", "", argument.lowered.metavar or "").removeprefix(f"{NONE}|")


def how_given(word: str) -> str:
    """Return how a command that trains takes a ``word`` that stands without an option; "" for any other word.

    Example: ``how_given("resnet18") == "a network is given as --model resnet18"``
    """
    from raytrain.training.model_names import is_network  # most commands do without it

    name, equals, value = word.partition("=")
    option = name if name in hints_of(TrainConfig) else option_known_as(name)
    if equals and option:
        return f"an option is given as {shlex.join([flag(option), value])}"
    if "://" in word or os.path.isdir(word):
        return f"images are given as --data {shlex.quote(word)}"
    if re.search(r"\.py(:\w*)?$", word):
        return f"a loop of your own is given as --loop {shlex.quote(word)}"
    if is_network(word):
        return f"a network is given as --model {shlex.quote(word)}"
    return ""


def _folder_of_several(argv: Sequence[str], word: str) -> tuple[str, str] | None:
    """Return the option and the folder of ``--data photos/*``, for which the shell put folders; None if it is not that.

    ``word`` is the second of the folders.
    """
    at = argv.index(word) if word in argv else 0  # it may be a part of one, as in --trust=yes
    option, first = argv[at - 2 : at] if at >= 2 else ("", "")
    folder, other = (os.path.dirname(path.rstrip("/")) or "." for path in (first, word))
    is_pattern = option.startswith("--") and folder == other and os.path.isdir(first) and os.path.isdir(word)
    return (option, folder) if is_pattern else None
