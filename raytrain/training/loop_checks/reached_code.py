"""Finds the user's code that a loop reaches, and its source lines, which are sent to the workers with the loop.

A loop may be written in a cell of a notebook, or in a file that another machine lacks. A worker that fails in it would
know the number of the line, but not the line itself. So the driver sends the lines of those functions that it sends
anyway, and the worker stores them where Python looks for the lines of a traceback.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from tokenize import TokenError
from types import CodeType, FunctionType, MethodType
from typing import Any

from raytrain.config.user_code import is_of_user, is_users_class, variables_of
from raytrain.errors import file_title


@dataclass(frozen=True)
class SourceLines:
    """Lines of the functions in one file, by their numbers from 1. ``title`` is the file's name in sentences."""

    title: str
    lines: Mapping[int, str]


NO_SOURCE = OSError, TypeError, IndexError, SyntaxError, TokenError
"""What :mod:`inspect` and :mod:`ast` raise if the text of a function is not known, or is not whole."""


def own_code(function: Any) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """Yield the code of ``function`` and of all of the user's functions and classes that it leads to.

    With each code come the global variables of its module, by name. It leads to what the code names, to its default
    values, methods and decorated functions, and from there to what these name. A library's code is left out.

    Example::

        names = {name for code, _ in own_code(lambda run: run.build_model()) for name in code.co_names}
    """
    seen: dict[int, Any] = {}
    to_visit: list[tuple[Any, Mapping[str, Any]]] = [(function, {})]
    while to_visit:
        thing, namespace = to_visit.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # keeps it alive, so that no other object gets its ID
        referred: list[Any] = []
        if isinstance(thing, CodeType):
            yield thing, namespace
            referred = [constant for constant in thing.co_consts if isinstance(constant, CodeType)]
        elif isinstance(thing, FunctionType) and is_of_user(thing.__code__.co_filename):
            of_module, of_closure = variables_of(thing)
            namespace = thing.__globals__
            defaults = *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()
            referred = [thing.__code__, *of_module.values(), *of_closure.values(), *defaults]
        elif isinstance(thing, FunctionType):  # of a library's decorator, such as torch.no_grad(), around the user's
            referred = [*variables_of(thing)[1].values()] if thing.__closure__ else []
        elif isinstance(thing, MethodType):
            referred = [thing.__func__, type(thing.__self__)]
        elif isinstance(thing, partial):
            referred = [thing.func, *thing.args, *thing.keywords.values()]  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(thing, type) and is_users_class(thing):
            referred = [value for value in vars(thing).values() if isinstance(value, (FunctionType, type))]
        elif callable(thing):
            referred = [type(thing), getattr(thing, "__dict__", {}).get("__wrapped__")]  # as functools.cache keeps it
        to_visit += [(value, namespace) for value in referred]


def with_inner_code(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of all functions and classes in it.

    Example::

        names = {inner.co_name for inner in with_inner_code(train.__code__)}
    """
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner_code(constant)


def text_of(code: CodeType) -> tuple[list[str], int]:
    """Return the lines of ``code``, and the number of the first in its file; raise an OSError if they are not known.

    :mod:`inspect` would look for the file ``<string>``, from which the methods of a dataclass are said to be, among all
    modules each time, which takes milliseconds.
    """
    if code.co_filename == "<string>" and not linecache.getlines(code.co_filename):
        raise OSError("could not get source code")
    return inspect.getsourcelines(code)


def source_lines(function: Any) -> dict[str, SourceLines]:
    """Return the lines of ``function`` and of the user's functions that it leads to, by file.

    Functions are whole, so that they can be parsed again: a line such as ``else:`` or ``)`` has no code of its own. The
    other lines of a cell or a file are left out, because they may hold a secret. So are lines that are not known here.
    """
    lines: dict[str, dict[int, str]] = {}
    for code, _ in own_code(function):
        numbers = {number for _, _, number in code.co_lines() if number}
        with suppress(*NO_SOURCE):
            function_lines, first = text_of(code)
            numbers.update(range(first, first + len(function_lines)))
        lines.setdefault(code.co_filename, {}).update(
            (number, text) for number in numbers if (text := linecache.getline(code.co_filename, number))
        )
    return {file: SourceLines(file_title(file), numbered) for file, numbered in lines.items() if numbered}


def remember_source_lines(sources: Mapping[str, SourceLines]) -> None:
    """Let tracebacks of this process show the lines in ``sources``, of those files that this machine lacks."""
    for file, source in sources.items():
        if not linecache.getlines(file):
            # Lines that did not travel are blank. Without a time of change (None), linecache does not look for the file
            # again. The last field is the name to show.
            text = [source.lines.get(number, "\n") for number in range(1, max(source.lines) + 1)]
            linecache.cache[file] = sum(map(len, text)), None, text, source.title
