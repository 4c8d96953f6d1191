"""Finds mistakes in the user's code by reading its text, so that they are refused before torch is imported.

The code is not run, because it may do anything when it is imported, and importing torch takes seconds. Only certain
mistakes are looked for: a syntax error, a package that is not installed, a function that does not exist or cannot be
called with a run, an undefined name in code that the loop reaches, and an attribute that a run does not have. A file
that defines names while it runs, by ``from … import *`` or ``globals()``, is assumed to define all of them.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from raytrain.config.named_functions import file_of_function, find_spec, no_function
from raytrain.config.user_code import describe, is_of_user, line_of
from raytrain.errors import UsageError, did_you_mean
from raytrain.training.loop_checks.reached_code import NO_SOURCE, own_code, with_inner_code

_ANY_NAME = {"globals", "exec", "eval", "vars"}  # a file that calls them may define names that are not in its text
_ENDS = ("sys.exit", "exit", "quit", "os._exit")  # calls that end the process when the file is imported
_PLAIN_VALUES = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.DictComp)
_NOT_RUN = ("__annotate__", "__conditional_annotations__")  # code of annotations, since Python 3.14; no call runs it


def check_named_function(option: str, name: str, *, is_loop: bool = False, runs_here: bool = True) -> None:
    """Raise UsageError for a mistake in the file of the function ``name``, as far as its text shows it.

    ``option`` has named it, and begins the sentence. ``is_loop``: the function is called with a run. ``runs_here``: it
    runs on this machine, so the packages that it imports must be installed here.

    Example: ``check_named_function("--loop", "my_loop.py:train", is_loop=True)``
    """
    function, file = name.rpartition(":")[2], file_of_function(name)
    if file is None or not file.is_file():
        return  # a library's, or installed in a way in which only an import finds it

    # The file must compile, be named as a module if it imports its neighbours, and find its packages.
    failure = f"{option} {name} cannot be imported"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
        code = compile(tree, str(file), "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{failure}: {describe(error)}.") from None
    relative = next((node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level), None)
    if relative is not None and name.rpartition(":")[0].endswith(".py"):
        module = f"{file.resolve().parent.name}.{file.stem}"
        raise UsageError(
            f"{option} {name} is a file of a package, as it imports others of it by a dot "
            f"({line_of(str(file), relative.lineno)}): name its module, as in {option} {module}:{function}, from the "
            "folder that holds the package, or with that folder in PYTHONPATH."
        )
    if runs_here and (missing := _missing_package(tree, file)):
        package, number = missing
        raise UsageError(f"{failure}: ModuleNotFoundError: No module named {package!r} ({line_of(str(file), number)}).")

    # A file that raises an exception, or ends its process, at its top level cannot be imported.
    for node in tree.body:
        call = ast.unparse(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
        if isinstance(node, ast.Raise) or call in _ENDS:
            raise UsageError(f"{failure}: its import ends at {line_of(str(file), node.lineno)}.")

    # Find names that the file does not define, also in those of its functions that the loop reaches. Compiled,
    # `from … import *` is an import of the constant ("*",).
    if any(_ANY_NAME & {*inner.co_names} or ("*",) in inner.co_consts for inner in with_inner_code(code)):
        return
    defined = _names_stored(with_inner_code(code))
    if function not in defined:
        raise no_function(option, name, _names_stored([code]))
    functions = {constant.co_name: constant for constant in code.co_consts if isinstance(constant, CodeType)}
    reached = _codes_of_file(code, functions, function)
    _refuse_undefined(f"{option} {name}", ((code_reached, defined) for code_reached in reached))

    # Check what the last statement that assigns the name makes of it.
    compiled = ((node, compile(ast.Module([node], []), "statement", "exec")) for node in reversed(tree.body))
    last = next((node for node, statement in compiled if function in _names_stored([statement])), None)
    _refuse_if_no_function(f"{option} {name}", last, str(file), is_loop=is_loop)

    if isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)) and not last.decorator_list:
        _refuse_if_calls_run_nothing(f"{option} {name}", functions[function].co_flags, is_loop=is_loop)

    # Check the loop's arguments, and the attributes of the run that it uses.
    if is_loop:
        definition = next((node for node in reversed(tree.body) if _defines(node, function)), None)
        if definition is not None:
            _check_definition(f"{option} {name}", cast(ast.FunctionDef, definition), str(file))


def _refuse_if_no_function(subject: str, last: ast.stmt | None, file: str, *, is_loop: bool) -> None:
    """Raise UsageError if the ``last`` statement that assigns a name does not make it a function that can be called.

    These are a plain value, such as a number or a list, and for a loop, a class or a lambda with other arguments.
    ``subject`` begins the sentence: an option and the name.
    """
    if is_loop and isinstance(last, ast.ClassDef):
        raise UsageError(
            f"{subject} is a class, and a loop is a function of one argument, the run ({line_of(file, last.lineno)})."
        )
    if not isinstance(last, (ast.Assign, ast.AnnAssign)) or last.value is None:
        return
    targets = last.targets if isinstance(last, ast.Assign) else [last.target]
    if not all(isinstance(target, ast.Name) for target in targets):
        return  # such as `train, test = make_loops()`, whose value is that of no single name
    if isinstance(last.value, _PLAIN_VALUES):
        raise UsageError(f"{subject} is no function ({line_of(file, last.lineno)}); name one that can be called.")
    if is_loop and isinstance(last.value, ast.Lambda):
        _refuse_other_arguments(subject, last.value.args, line_of(file, last.lineno))


def _refuse_if_calls_run_nothing(subject: str, flags: int, *, is_loop: bool = True) -> None:
    """Raise UsageError if the ``flags`` of a function's code are those of a generator or a coroutine."""
    if flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        advice = "a loop is a plain function" if is_loop else "give a plain function"
        raise UsageError(f"{subject} has yield or async, so that a call runs nothing of it; {advice}.")


def check_loop_function(loop: Callable[..., Any]) -> None:
    """Raise UsageError for a mistake in a ``loop`` that was given as a function, as far as its code shows it.

    Example: ``check_loop_function(lambda run: run.epochs())``
    """
    signature = None
    with suppress(ValueError, TypeError):  # a function of a library in C has no signature
        signature = inspect.signature(loop, follow_wrapped=False)
    try:
        if signature is not None:
            signature.bind(None)  # for a run
    except TypeError as error:
        raise UsageError(f"The loop is called with one argument, the run, and cannot be: {error}.") from None

    if isinstance(loop, FunctionType):
        _refuse_if_calls_run_nothing("The loop", loop.__code__.co_flags)

    # Find undefined names in its code, and in the user's functions that it calls.
    codes = list(own_code(loop))
    if not any(_ANY_NAME & {*code.co_names} for code, _ in codes):
        stored = _names_stored(code for code, _ in codes)  # a function may set global variables for another one
        _refuse_undefined("The loop", ((code, stored | namespace.keys()) for code, namespace in codes))

    # Find attributes that a run does not have, if the loop's text is known.
    if isinstance(loop, FunctionType):
        with suppress(*NO_SOURCE):
            text, first = inspect.getsourcelines(loop.__code__)  # for a wrapper, its own text, not the wrapped one's
            definition = ast.parse(textwrap.dedent("".join(text))).body[0]
            if _defines(definition, loop.__code__.co_name):
                ast.increment_lineno(definition, first - definition.lineno)
                _check_definition("The loop", cast(ast.FunctionDef, definition), loop.__code__.co_filename)


def _missing_package(tree: ast.Module, file: Path) -> tuple[str, int] | None:
    """Return the first package that the file imports but that is not installed, with the number of the line, or None.

    Only imports that are always run count, up to the first import of a module of the user's own, or the first use of
    sys.path: after that, modules may be found in folders that are not known here.
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
            spec = find_spec(package, str(file.resolve().parent))
            if spec is None:
                return package, node.lineno
            # A module of the user's own may change sys.path.
            origin = getattr(spec, "origin", None)
            if origin not in (None, "built-in", "frozen") and is_of_user(origin) and package != "raytrain":
                return None
    return None


def _codes_of_file(module: CodeType, functions: Mapping[str, CodeType], loop: str) -> Iterator[CodeType]:
    """Yield the code that runs when a file is imported, and when its function ``loop`` is called.

    ``module`` is the code of the file, and ``functions`` has the code of its functions and classes, by name. A function
    is reached if the file itself reads its name, or code that is reached contains the name.
    """
    yield module
    names_to_visit = [loop, *(name for name, _ in _names_loaded(module))]
    seen = set[str]()
    while names_to_visit:
        name = names_to_visit.pop()
        if name in functions and name not in seen:
            seen.add(name)
            for code in with_inner_code(functions[name]):
                names_to_visit += code.co_names
                yield code


def _names_loaded(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield the global names that ``code`` reads, each with the offset of the instruction in the bytecode."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval, instruction.offset


def _names_stored(codes: Iterable[CodeType]) -> set[str]:
    """Return the names that ``codes`` assign at the top level of a file or a class, or as global variables."""
    instructions = (instruction for code in codes for instruction in dis.get_instructions(code))
    return {instruction.argval for instruction in instructions if instruction.opname in ("STORE_NAME", "STORE_GLOBAL")}


def _refuse_undefined(subject: str, codes: Iterator[tuple[CodeType, Any]]) -> None:
    """Raise UsageError for the first name that code reads and that nothing defines.

    ``codes`` are pairs of code and the names that are defined for it. Code that names NameError is left out: it
    expects that a name may be missing.
    """
    for code, defined in codes:
        if code.co_name in _NOT_RUN or "NameError" in code.co_names:
            continue
        for name, offset in _names_loaded(code):
            is_set_by_python = name.startswith("__")  # such as __file__
            if name in defined or hasattr(builtins, name) or is_set_by_python:
                continue
            # Find the line: the last one that begins at or before the instruction.
            offsets, numbers = zip(*dis.findlinestarts(code), strict=True)
            number = numbers[bisect_right(offsets, offset) - 1] or code.co_firstlineno
            where = line_of(code.co_filename, number)
            local_names = [*code.co_varnames, *code.co_cellvars, *code.co_freevars]
            hint = did_you_mean(name, [*local_names, *defined, *dir(builtins)])
            raise UsageError(f"{subject}: NameError: name {name!r} is not defined{hint} ({where}).")


def _defines(node: ast.stmt, name: str) -> bool:
    """Return True if the statement ``node`` defines the function ``name``."""
    return isinstance(node, ast.FunctionDef) and node.name == name


def _check_definition(subject: str, loop: ast.FunctionDef, file: str) -> None:
    """Raise UsageError if a loop cannot be called with a run, or uses an attribute that a run does not have.

    A loop with a decorator is not checked.
    """
    if loop.decorator_list:
        return  # the decorator decides which arguments it takes
    _refuse_other_arguments(subject, loop.args, line_of(file, loop.lineno))

    # The run is the first argument. Nothing is refused if the loop assigns that name again, sets the attribute itself,
    # or looks for missing attributes.
    positional = [*loop.args.posonlyargs, *loop.args.args]
    if not positional:
        return
    run = positional[0].arg
    nodes = list(ast.walk(loop))
    is_reassigned = any(
        (isinstance(node, ast.Name) and node.id == run and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.arg) and node.arg == run and node is not positional[0])  # of a function inside
        for node in nodes
    )
    asks_first = any(isinstance(node, ast.Name) and node.id in ("hasattr", "AttributeError") for node in nodes)
    if is_reassigned or asks_first:
        return
    of_run = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == run
    ]
    set_by_loop = {node.attr for node in of_run if not isinstance(node.ctx, ast.Load)}
    for node in of_run:
        is_special = node.attr.startswith("__")  # such as __dict__
        if node.attr not in run_attributes() | set_by_loop and not is_special:
            hint = did_you_mean(node.attr, [name for name in run_attributes() if not name.startswith("_")])
            raise UsageError(f"{subject}: a run has no {node.attr!r}{hint} ({line_of(file, node.lineno)}).")


def _refuse_other_arguments(subject: str, arguments: ast.arguments, where: str) -> None:
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
        raise UsageError(f"{subject} {takes}, and a loop is called with one, the run ({where}).")


@cache
def run_attributes() -> frozenset[str]:
    """Return the names of all attributes of :class:`raytrain.training.run.Run`: methods, fields, and what it sets.

    They are read from its text, because its import needs torch.

    Example: ``"epochs" in run_attributes()``
    """
    tree = ast.parse(Path(__file__).parents[1].joinpath("run.py").read_text("utf-8"))
    (run,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run"]
    names = set(dir(object))  # such as __class__, which every object has
    for node in ast.walk(run):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return frozenset(names)
