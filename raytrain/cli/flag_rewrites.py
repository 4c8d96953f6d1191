"""Rewrites the flags that people type into those that tyro takes.

Some options are a switch or a word: ``--compile`` and ``--compile reduce-overhead``. To tyro such an option always
needs a value. And if a flag is given twice, tyro silently drops the values of the first one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

from tyro.conf import Positional, UseAppendAction

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark, Synonym
from raytrain.config.options import marks_of, options_with
from raytrain.errors import UsageError, flag


def complete_switches(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line, with a value for each option that is a switch or a word; tyro needs one.

    A switch gets True or False: ``--compile`` becomes ``--compile True``, ``--no-compile`` becomes ``--compile False``.
    ``--compile reduce-overhead`` stays as it is: a word that follows, and is no flag, is the value.
    """
    completed: list[str] = []
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        switch = word.replace("_", "-").replace("--no-", "--", 1)
        if switch not in _switches_with_words():
            completed.append(word)
        elif word.startswith("--no-"):
            completed += [switch, "False"]
        else:
            completed += [switch, "True"] if following.startswith("--") else [switch]
    return completed


@functools.cache
def _switches_with_words() -> set[str]:
    """Return the flags of the options that are either a switch or a word."""
    return {flag(name) for name, hint in get_type_hints(TrainConfig).items() if bool in get_args(hint)}


class _CommandFlags(NamedTuple):
    """The flags of a command, by the values that they take.

    ``option_of`` has each spelling of a flag that takes at most one value, such as ``--lr``, with the flag that it
    stands for. Those of ``repeatable`` may be given several times, and ``switches`` take no value. Flags in ``several``
    take any number of values. ``takes_names``: any number of words without a flag may follow, as ``rm`` takes the names
    of runs.
    """

    option_of: dict[str, str]
    several: set[str]
    repeatable: set[str]
    switches: set[str]
    takes_names: bool

    def option(self, word: str) -> str:
        """Return the flag that ``word`` stands for, such as ``--learning-rate`` for ``--lr=0.1``."""
        typed = word.partition("=")[0].replace("_", "-")
        return self.option_of.get(typed, typed)


def join_repeated(argv: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """Return the words of a command line, with the values of each repeated option, and all names, in one place.

    ``--tag a --tag b`` becomes ``--tag a b``, because tyro would drop ``a``. ``rm first --yes second`` becomes
    ``rm first second --yes``, because tyro would refuse a name that follows an option. Words after ``--``, which are
    another command's, stay as they are. ``command`` is the function of the command, whose annotations say how many
    values an option takes.

    Raises UsageError if an option of one value is given twice; tyro would drop the first one.
    """
    flags = _flags_of(command)
    end = argv.index("--") if "--" in argv else len(argv)
    words, other_command = argv[:end], [*argv[end:]]

    # Divide the words into groups: those before the first flag, and each flag with the words that follow it. The values
    # of an option of several values join its first group.
    group: list[str] = []
    groups = [group]
    first_group: dict[str, list[str]] = {}  # by option
    for word in words:
        if not word.startswith("--"):
            group.append(word)
            continue
        name, equals, value = word.partition("=")
        option = flags.option(word)
        if option in flags.several and option in first_group:
            group = first_group[option]
            group += [value] if equals else []
            continue
        group = [name, value] if option in flags.several and equals else [word]
        groups.append(group)
        first_group.setdefault(option, group)

    # A second group of an option of one value is a repetition. Flags that the command does not have are left to tyro.
    for group in groups[1:]:
        option = flags.option(group[0])
        first = first_group[option]
        if group is first or option not in flags.option_of or option in flags.repeatable:
            continue
        problem = f"{' '.join(first)} and {' '.join(group)} are both given"
        if group == first:
            problem = f"{first[0]} is given twice"
        if option in map(flag, options_with(Mark.SECRET)):  # its values are not shown
            problem = f"{option} is given twice"
        raise UsageError(f"{problem}; leave one of them out.")

    # In a command that takes names, the words after the one value of an option, or after a switch, are names.
    if flags.takes_names and not other_command:
        for group in groups[1:]:
            option = flags.option(group[0])
            if option in flags.option_of:
                num_words = 1 if "=" in group[0] or option in flags.switches else 2
                groups[0] += group[num_words:]
                del group[num_words:]
    return [word for group in groups for word in group] + other_command


@functools.cache
def _flags_of(command: Callable[..., Any]) -> _CommandFlags:
    """Return the flags of a command, of its sections of options, and those that all commands have."""
    (positional,) = marks_of(Positional[str])
    hints: dict[str, Any] = {"json": bool, "debug": bool}
    takes_names = False
    for name, hint in hints_of_command(command).items():
        section = TrainConfig if name == "config" else hint
        if dataclasses.is_dataclass(section):
            hints |= get_type_hints(section, include_extras=True)
        hints[name] = str if section is TrainConfig else hint  # `config` is also the flag --config FILE
        takes_names |= positional in marks_of(hint) and ... in get_args(get_args(hint)[0])

    option_of: dict[str, str] = {}
    several, repeatable, switches = set[str](), set[str](), set[str]()
    for name, hint in hints.items():
        option = flag(name)
        bare = get_args(hint)[0] if marks_of(hint) else hint
        if UseAppendAction in marks_of(hint):
            repeatable.add(option)
        elif any(... in get_args(part) for part in (bare, *get_args(bare))):  # tuple[str, ...], also with None
            several.add(option)
            continue
        if bare is bool:
            switches.add(option)
        for spelling in (option, *(mark.flag for mark in marks_of(hint) if isinstance(mark, Synonym))):
            option_of[spelling] = option
        option_of[option.replace("--", "--no-", 1)] = option
    return _CommandFlags(option_of, several, repeatable, switches, takes_names)


def hints_of_command(command: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a command's parameters, by name."""
    hints = get_type_hints(command, include_extras=True)
    return {name: _without_added_none(hint) for name, hint in hints.items() if name != "return"}


def _without_added_none(hint: Any) -> Any:
    """Return the annotation of a parameter without the None that Python 3.10 adds to it if None is its default.

    It would hide the text and the marks in ``Annotated[int | None, …]`` from the parser.
    """
    annotated = [kind for kind in get_args(hint) if marks_of(kind)]
    return annotated[0] if get_args(hint) == (*annotated, type(None)) else hint
