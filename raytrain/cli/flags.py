"""Flags as people write them, made into those that tyro takes: switches alone, and options that are given twice.

For tyro, an option that is a switch and may be a word besides has a value, and of a flag that is there twice it keeps
the last one without a word.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

from tyro.conf import UseAppendAction

from raytrain.config import TrainConfig
from raytrain.config.marks import Mark, Synonym
from raytrain.config.options import marks_of, options_with
from raytrain.errors import UsageError, flag


def complete_switches(argv: Sequence[str]) -> list[str]:
    """Return ``--compile`` alone as ``--compile True``, and ``--no-compile`` as ``--compile False``.

    That is for all options that are a switch and may be a word besides: for tyro, those have a value.
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
    """Return the flags of the options that are a switch, and may be a word besides."""
    return {flag(name) for name, hint in get_type_hints(TrainConfig).items() if bool in get_args(hint)}


def join_repeated(argv: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """Return ``--tag a --tag b`` as ``--tag a b``, for all options with several values: tyro keeps the last flag's.

    Raises UsageError if an option of one value is there twice, of which tyro would keep the last, too.
    """
    single, several, appending = _flags_by_number(command)
    groups: list[list[str]] = [[]]  # a flag with its values, in each but the first
    group, group_of = groups[0], dict[str, list[str]]()
    for number, word in enumerate(argv):
        if word == "--":  # of submit: what follows is another command
            groups.append([*argv[number:]])
            break
        if not word.startswith("--"):
            group.append(word)
            continue

        # `--tag=a` and `--lr` are other ways to write `--tag a` and `--learning-rate`.
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

    # Two groups of one option: each but the first is a repetition.
    for group in groups[1:]:
        typed = group[0].partition("=")[0].replace("_", "-")
        first = group_of.get(single.get(typed, typed), group)
        if first is not group and group[0] != "--":
            if single[typed] in map(flag, options_with(Mark.SECRET)):  # its values are not shown
                first = group = [single[typed]]
            what = f"{' '.join(first)} and {' '.join(group)} are both given"
            raise UsageError(f"{what if first != group else f'{first[0]} is given twice'}; leave one of them out.")
    return [word for group in groups for word in group]


@functools.cache
def _flags_by_number(command: Callable[..., Any]) -> tuple[dict[str, str], set[str], set[str]]:
    """Return the flags of a command: of one value, with all their spellings, of several, and those that append."""
    hints: dict[str, Any] = {"json": bool, "debug": bool}
    for name, hint in hints_of_command(command).items():
        section = TrainConfig if name == "config" else hint
        if dataclasses.is_dataclass(section):
            hints |= get_type_hints(section, include_extras=True)
        hints[name] = str if section is TrainConfig else hint  # of the options themselves it is --config FILE

    single: dict[str, str] = {}
    several, appending = set[str](), set[str]()
    for name, hint in hints.items():
        option = flag(name)
        bare = get_args(hint)[0] if marks_of(hint) else hint
        if UseAppendAction in marks_of(hint):
            appending.add(option)
        elif any(... in get_args(each) for each in (bare, *get_args(bare))):
            several.add(option)
            continue
        for spelling in (option, *(mark.flag for mark in marks_of(hint) if isinstance(mark, Synonym))):
            single[spelling] = option
        single[option.replace("--", "--no-", 1)] = option
    return single, several, appending


def hints_of_command(command: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a command's parameters, by name."""
    hints = get_type_hints(command, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}
