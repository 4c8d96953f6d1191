"""Mistakes in the user's code that its text shows, so that they are refused before torch is imported.

Nothing of it is run: it may do anything when it is imported, and torch takes seconds. What is looked for is certain: a
syntax error, a package that is not installed, a function that is not there or cannot be called with a run, a name that
nothing defines in code that the loop leads to, and an attribute that no run has. A file that makes names while it runs,
by ``from … import *`` or ``globals()``, is believed to define all of them.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib.util
import inspect
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from raytrain.config.user_code import describe, is_of_user, line_of, no_function
from raytrain.errors import UsageError, did_you_mean
from raytrain.training.loop_source import own_code

_ANY_NAME = {"globals", "exec", "eval", "vars"}  # a file that calls them may define names that are not in its text
_ENDS = ("sys.exit", "exit", "quit", "os._exit")  # of the process, when the file is imported
_PLAIN_VALUES = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.DictComp)
_NOT_RUN = ("__annotate__", "__conditional_annotations__")  # code of annotations, since Python 3.14


def check_named_function(option: str, name: str, *, is_loop: bool = False, runs_here: bool = True) -> None:
    """Raise UsageError for a mistake in the file of the function that ``option`` names, as far as its text shows it.

    ``is_loop``: the function is called with a run. ``runs_here``: it needs the packages that are installed here.

    Example: ``check_named_function("--loop", "my_loop.py:train", is_loop=True)``
    """
    function, file = name.rpartition(":")[2], file_of_function(name)
    if file is None or not file.is_file():
        return  # it is installed in a way that only its import knows
    failure = f"{option} {name} cannot be imported"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
        code = compile(tree, str(file), "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{failure}: {describe(error)}.") from None
    if runs_here and (missing := _missing_package(tree, file)):
        package, number = missing
        raise UsageError(f"{failure}: ModuleNotFoundError: No module named {package!r} ({line_of(str(file), number)}).")

    # A file that raises an exception, or ends its process, does so whoever imports it.
    for node in tree.body:
        call = ast.unparse(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
        if isinstance(node, ast.Raise) or call in _ENDS:
            raise UsageError(f"{failure}: its import ends at {line_of(str(file), node.lineno)}.")

    # The names that the file defines; those of functions that it has itself are followed.
    functions = {constant.co_name: constant for constant in code.co_consts if isinstance(constant, CodeType)}
    codes = list(_codes_of_file(code, functions, function))
    if any(_ANY_NAME & {*one.co_names} or ("*",) in one.co_consts for one in _with_inner(code)):
        return
    known = _stored(_with_inner(code))
    if function not in known:
        raise no_function(option, name, _stored([code]))
    _refuse_undefined(f"{option} {name}", ((one, known) for one in codes))

    # What the name stands for in the end, as far as its last statement shows it.
    compiled = ((node, compile(ast.Module([node], []), "statement", "exec")) for node in reversed(tree.body))
    last = next((node for node, statement in compiled if function in _stored([statement])), None)
    _refuse_if_no_function(f"{option} {name}", last, str(file), is_loop=is_loop)

    if isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)) and not last.decorator_list:
        _refuse_if_calls_run_nothing(f"{option} {name}", functions[function].co_flags, is_loop=is_loop)

    # How the loop is called, and what it asks its run for.
    if is_loop:
        definition = next((node for node in reversed(tree.body) if _defines(node, function)), None)
        if definition is not None:
            _check_definition(f"{option} {name}", cast(ast.FunctionDef, definition), str(file))


def _refuse_if_no_function(whose: str, last: ast.stmt | None, file: str, *, is_loop: bool) -> None:
    """Raise UsageError if the ``last`` statement that stores a name makes it a plain value or, of a loop, a class."""
    if is_loop and isinstance(last, ast.ClassDef):
        raise UsageError(
            f"{whose} is a class, and a loop is a function of one argument, the run ({line_of(file, last.lineno)})."
        )
    if not isinstance(last, (ast.Assign, ast.AnnAssign)) or last.value is None:
        return
    targets = last.targets if isinstance(last, ast.Assign) else [last.target]
    if not all(isinstance(target, ast.Name) for target in targets):
        return
    if isinstance(last.value, _PLAIN_VALUES):
        raise UsageError(f"{whose} is no function ({line_of(file, last.lineno)}); name one that can be called.")
    if is_loop and isinstance(last.value, ast.Lambda):
        _refuse_other_arguments(whose, last.value.args, line_of(file, last.lineno))


def _refuse_if_calls_run_nothing(whose: str, flags: int, *, is_loop: bool = True) -> None:
    """Raise UsageError if the ``flags`` of a function's code are those of a generator or a coroutine."""
    if flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        advice = "a loop is a plain function" if is_loop else "give a plain function"
        raise UsageError(f"{whose} has yield or async, so that a call runs nothing of it; {advice}.")


def check_loop_function(loop: Callable[..., Any]) -> None:
    """Raise UsageError for a mistake in a ``loop`` that was given as a function, as far as its code shows it.

    Example: ``check_loop_function(lambda run: run.epochs())``
    """
    signature = None
    with suppress(ValueError, TypeError):  # one of a library in C has no signature
        signature = inspect.signature(loop, follow_wrapped=False)
    try:
        if signature is not None:
            signature.bind(None)
    except TypeError as error:
        raise UsageError(f"The loop is called with one argument, the run, and cannot be: {error}.") from None

    if isinstance(loop, FunctionType):
        _refuse_if_calls_run_nothing("The loop", loop.__code__.co_flags)

    # The names that its code reads, in cells and files of the user's.
    codes = list(own_code(loop))
    if not any(_ANY_NAME & {*code.co_names} for code, _ in codes):
        stored = _stored(code for code, _ in codes)
        _refuse_undefined("The loop", ((code, stored | namespace.keys()) for code, namespace in codes))

    # What it asks its run for, by its text, if it has one of its own.
    if isinstance(loop, FunctionType):
        with suppress(OSError, SyntaxError, IndexError):
            text, first = inspect.getsourcelines(loop.__code__)  # of a wrapper its own, not that of what it wraps
            definition = ast.parse(textwrap.dedent("".join(text))).body[0]
            if _defines(definition, loop.__code__.co_name):
                ast.increment_lineno(definition, first - definition.lineno)
                _check_definition("The loop", cast(ast.FunctionDef, definition), loop.__code__.co_filename)


def file_of_function(name: str) -> Path | None:
    """Return the file of the user's function ``name``; None if there is none, or it is a library's. Imports nothing.

    Example: ``file_of_function("my_loop.py:train") == Path("my_loop.py")``
    """
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    package, *inner = place.split(".")
    spec = _find(package)
    for part in inner:
        folders = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    file = spec and spec.has_location and spec.origin
    return Path(file) if file and is_of_user(file) else None


def _find(package: str, *folders: str) -> Any:
    with suppress(ValueError, ImportError):  # it is imported already, in a way that has no spec
        return importlib.util.find_spec(package) or PathFinder.find_spec(package, list(folders))
    return package


def _missing_package(tree: ast.Module, file: Path) -> tuple[str, int] | None:
    """Return the first package that the file imports and that is not there, with the number of the line.

    Only imports that always happen count. They are followed to the first one of the user's own modules, or to where the
    file uses sys.path: from there on, modules may be found in folders that nobody knows here.
    """
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules = [node.module]
        elif "sys.path" in ast.unparse(node):
            return None
        else:
            continue
        for module in modules:
            package = module.partition(".")[0]
            spec = _find(package, str(file.resolve().parent))
            if spec is None:
                return package, node.lineno
            origin = getattr(spec, "origin", None)
            if origin not in (None, "built-in", "frozen") and is_of_user(origin) and package != "raytrain":
                return None
    return None


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of all functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _codes_of_file(module: CodeType, functions: Mapping[str, CodeType], loop: str) -> Iterator[CodeType]:
    """Yield the code that runs when a file is imported, and when its function ``loop`` is called."""
    yield module
    loaded = [name for name, _ in _loaded(module)]
    waiting, seen = [loop, *loaded], set[str]()
    while waiting:
        name = waiting.pop()
        if name in functions and name not in seen:
            seen.add(name)
            for code in _with_inner(functions[name]):
                waiting += code.co_names
                yield code


def _loaded(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield the global names that ``code`` reads, with the offset of each instruction."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval, instruction.offset


def _stored(codes: Any) -> set[str]:
    """Return the global names that ``codes`` define, and those of classes."""
    stored = ("STORE_NAME", "STORE_GLOBAL")
    return {each.argval for code in codes for each in dis.get_instructions(code) if each.opname in stored}


def _refuse_undefined(whose: str, codes: Iterator[tuple[CodeType, Any]]) -> None:
    """Raise UsageError for the first name that one of ``codes`` reads and that is not among its known names."""
    for code, known in codes:
        if code.co_name in _NOT_RUN or "NameError" in code.co_names:
            continue
        for name, offset in _loaded(code):
            if name not in known and not hasattr(builtins, name) and not name.startswith("__"):  # as __file__
                offsets, numbers = zip(*dis.findlinestarts(code), strict=True)
                number = numbers[bisect_right(offsets, offset) - 1] or code.co_firstlineno
                hint = did_you_mean(
                    name, [*code.co_varnames, *code.co_cellvars, *code.co_freevars, *known, *dir(builtins)]
                )
                where = line_of(code.co_filename, number)
                raise UsageError(f"{whose}: NameError: name {name!r} is not defined{hint} ({where}).")


def _defines(node: ast.stmt, name: str) -> bool:
    """Return True if the statement ``node`` defines the function ``name``."""
    return isinstance(node, ast.FunctionDef) and node.name == name


def _check_definition(whose: str, loop: ast.FunctionDef, file: str) -> None:
    """Raise UsageError if a loop cannot be called with a run, or asks it for an attribute that no run has."""
    if loop.decorator_list:
        return  # what it takes, the decorator decides
    _refuse_other_arguments(whose, loop.args, line_of(file, loop.lineno))

    # The run is the first argument, unless the loop gives that name to something else or sets attributes of its own.
    positional = [*loop.args.posonlyargs, *loop.args.args]
    if not positional or not run_attributes():
        return
    run = positional[0].arg
    of_run = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == run
    ]
    set_here = {node.attr for node in of_run if not isinstance(node.ctx, ast.Load)}
    is_renamed = any(
        (isinstance(node, ast.Name) and node.id == run and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.arg) and node.arg == run and node is not positional[0])
        for node in ast.walk(loop)
    )
    asks_first = any(isinstance(node, ast.Name) and node.id in ("hasattr", "AttributeError") for node in ast.walk(loop))
    for node in of_run:
        if node.attr not in run_attributes() | set_here and not is_renamed and not asks_first:
            hint = did_you_mean(node.attr, [name for name in run_attributes() if not name.startswith("_")])
            raise UsageError(f"{whose}: a run has no {node.attr!r}{hint} ({line_of(file, node.lineno)}).")


def _refuse_other_arguments(whose: str, arguments: ast.arguments, where: str) -> None:
    """Raise UsageError if a loop with these ``arguments`` cannot be called with a run alone."""
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    required_by_name = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    if num_required > 1 or required_by_name or not (positional or arguments.vararg):
        names = [argument.arg for argument in positional[:num_required]] + required_by_name
        takes = f"needs {len(names)} arguments, {', '.join(names)}" if names else "takes no argument"
        raise UsageError(f"{whose} {takes}, and a loop is called with one, the run ({where}).")


@cache
def run_attributes() -> frozenset[str]:
    """Return the names of all that a :class:`raytrain.training.run.Run` has, by the text of its class: it needs torch.

    Example: ``"epochs" in run_attributes()``
    """
    tree = ast.parse(Path(__file__).with_name("run.py").read_text("utf-8"))
    (run,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run"]
    names = set(dir(object))
    for node in ast.walk(run):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return frozenset(names)
