"""Rewrites the flags that people type into those that tyro takes.

Some options are a switch or a word: ``--compile`` and ``--compile reduce-overhead``. To tyro such an option always
needs a value. And if a flag is given twice, tyro silently drops the values of the first one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

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


def join_repeated(argv: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """Return ``--tag a --tag b`` as ``--tag a b``, for all options of several values; tyro would drop ``a``.

    ``command`` is the function of the command, whose annotations tell how many values an option takes. Words after
    ``--``, which are another command's, stay as they are. Names that follow an option's value, as in
    ``rm first --yes second``, join those before it, because tyro would refuse them.

    Raises UsageError if an option of one value is given twice; tyro would drop the first one.
    """
    single, several, appending, switches = _flags_by_number(command)
    groups: list[list[str]] = [[]]  # a flag with its values, in each but the first
    group, group_of = groups[0], dict[str, list[str]]()  # group_of: the first group of each option
    for number, word in enumerate(argv):
        if word == "--":  # of submit: what follows is another command
            groups.append([*argv[number:]])
            break
        if not word.startswith("--"):
            group.append(word)
            continue

        # `--tag=a` and `--lr` are other ways to write `--tag a` and `--learning-rate`. The values that follow a flag of
        # several join its first group.
        name, equals, value = word.partition("=")
        typed = name.replace("_", "-")
        option = single.get(typed, typed)
        if option in several:
            if option not in group_of:
                groups.append(group_of.setdefault(option, [name]))
            group = group_of[option]
            group += [value] * bool(equals)
            continue
        group = [word]
        groups.append(group)
        if typed in single and option not in appending:
            group_of.setdefault(option, group)

    # Options of several values have one group now. Of any other option, a second group is a repetition.
    for group in groups[1:]:
        typed = group[0].partition("=")[0].replace("_", "-")
        first = group_of.get(single.get(typed, typed), group)
        if first is not group and group[0] != "--":
            if single[typed] in map(flag, options_with(Mark.SECRET)):  # its values are not shown
                first = group = [single[typed]]
            what = f"{' '.join(first)} and {' '.join(group)} are both given"
            raise UsageError(f"{what if first != group else f'{first[0]} is given twice'}; leave one of them out.")

    # An option of one value has no other ones, and a switch has none. In a command that takes a list of names, what
    # follows these is a name.
    if _takes_names(command) and "--" not in argv:
        for group in groups[1:]:
            typed, equals, _ = group[0].partition("=")
            if (option := single.get(typed.replace("_", "-"))) is not None:
                num_words = 1 if equals or option in switches else 2
                groups[0] += group[num_words:]
                del group[num_words:]
    return [word for group in groups for word in group]


@functools.cache
def _flags_by_number(command: Callable[..., Any]) -> tuple[dict[str, str], set[str], set[str], set[str]]:
    """Return the flags of a command by the number of their values.

    Those of one value are a dict from each of their spellings to the flag. Those of several values, those that may be
    repeated (``UseAppendAction``), and those of the first that take no value are sets.
    """
    hints: dict[str, Any] = {"json": bool, "debug": bool}
    for name, hint in hints_of_command(command).items():
        section = TrainConfig if name == "config" else hint
        if dataclasses.is_dataclass(section):
            hints |= get_type_hints(section, include_extras=True)
        hints[name] = str if section is TrainConfig else hint  # `config` is also the flag --config FILE

    single: dict[str, str] = {}
    several, appending, switches = set[str](), set[str](), set[str]()
    for name, hint in hints.items():
        option = flag(name)
        bare = get_args(hint)[0] if marks_of(hint) else hint
        if UseAppendAction in marks_of(hint):
            appending.add(option)
        elif any(... in get_args(part) for part in (bare, *get_args(bare))):
            several.add(option)
            continue
        if bare is bool:
            switches.add(option)
        for spelling in (option, *(mark.flag for mark in marks_of(hint) if isinstance(mark, Synonym))):
            single[spelling] = option
        single[option.replace("--", "--no-", 1)] = option
    return single, several, appending, switches


@functools.cache
def _takes_names(command: Callable[..., Any]) -> bool:
    """Return True if a command takes any number of words without a flag, as ``rm`` takes the names of runs."""
    (positional,) = marks_of(Positional[str])
    hints = hints_of_command(command).values()
    return any(positional in marks_of(hint) and ... in get_args(get_args(hint)[0]) for hint in hints)


def hints_of_command(command: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a command's parameters, by name."""
    hints = get_type_hints(command, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}
