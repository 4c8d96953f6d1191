"""Finds a number that counts batches or epochs, as of ``enumerate``, by which a loop decides how it trains.

A resume enters in the middle of an epoch, where a number of batches begins at 0 again, as that of epochs does. Loops
that add up gradients then step after other batches, and not after the last one of the epoch; a rate or a weight of a
loss that grows with the batches begins again. The same holds for what ``zip`` pairs with them. A number that is only
printed does no harm, so the text of the loop is searched for what it decides. With ``i`` of ``enumerate``, or what is
computed from it, these do:

========================================  =================================================
``if i % 2: optimizer.step()``            an ``if`` with a training call, or with a new rate
``if i > 5: loss = loss + penalty``       an ``if`` with a new loss, before its backward
``group["lr"] = 0.1 * i``                 a new rate
``adjust_rate(optimizer, i)``             an argument of a function that sets a rate
``scheduler.step(i)``                     an argument of a step
``(loss * weights[i]).backward()``        a factor of the loss
========================================  =================================================
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from raytrain.training.batches.batch import Epoch
from raytrain.training.loop_checks.reached_code import NO_SOURCE

_TRAINING_CALLS = {"step", "zero_grad", "backward", "unscale_", "update_parameters", "no_sync"}  # names of methods
_RATES = {"lr", "momentum", "betas", "weight_decay"}  # options of an optimizer's group
_OF_NUMBERS = {"float", "int", "bool", "abs", "min", "max", "pow", "round"}  # functions of Python


def number_that_decides(frame: FrameType) -> str | None:
    """Return the name of the variable that goes with the batches, by which the loop decides; None if there is none.

    ``frame`` is that of the function that asks for a batch, in the line of its ``for``. None also if the text of the
    function is not known.

    Example: ``i`` in ``for i, batch in enumerate(epoch):`` with ``if i % 2: optimizer.step()``.
    """
    with suppress(*NO_SOURCE):
        function, line = _function_and_line(frame)
        variables = {**frame.f_globals, **frame.f_locals}
        for loop in ast.walk(function):
            if isinstance(loop, ast.For) and loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno):
                numbers = [*_names_beside(loop.target, loop.iter, variables), *_counters(loop, function)]
                return next((number for number in numbers if _decides(number, loop.body, variables)), None)
    return None


def epoch_number_that_decides(frame: FrameType) -> str | None:
    """Return what counts the epochs, by which the loop decides, as :func:`number_that_decides` does for batches.

    ``frame`` is that of a function whose line is within its loop over ``run.epochs()``. A part of the epochs is counted
    by ``islice``, which is returned itself.

    Example: ``e`` in ``for e, epoch in enumerate(run.epochs()):`` with ``if e > 5: loss = loss + penalty``.
    """
    with suppress(*NO_SOURCE):
        function, line = _function_and_line(frame)
        variables = {**frame.f_globals, **frame.f_locals}
        for loop in ast.walk(function):
            if not isinstance(loop, ast.For) or not loop.lineno <= line <= (loop.end_lineno or loop.lineno):
                continue
            if ".epochs(" in (iterable := ast.unparse(loop.iter)):
                if "islice(" in iterable:
                    return iterable
                numbers = _names_beside(loop.target, loop.iter, variables)
                return next((number for number in numbers if _decides(number, loop.body, variables)), None)
    return None


def _function_and_line(frame: FrameType) -> tuple[ast.AST, int]:
    """Return the function or module that ``frame`` runs, and the line that it has reached, counted within it.

    Raises an exception of ``NO_SOURCE`` if its text is not known.
    """
    lines, first = inspect.getsourcelines(frame.f_code)
    # The tree counts the lines from the function's first one; of a module, inspect says that this is line 0.
    return ast.parse(textwrap.dedent("".join(lines))), frame.f_lineno - max(first, 1) + 1


def _names_beside(target: ast.expr, iterable: ast.expr, variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in the ``target`` of a loop that ``enumerate`` or ``zip`` in its ``iterable`` adds.

    What ``zip`` takes from a ``DataLoader`` or a generator is left out: it may be in random order, and has no number.
    """
    if not isinstance(iterable, ast.Call) or not iterable.args:
        return
    function, parts = ast.unparse(iterable.func), target.elts if isinstance(target, ast.Tuple) else []
    if function == "enumerate" and len(parts) == 2:
        yield from _assigned_names(parts[0])
        yield from _names_beside(parts[1], iterable.args[0], variables)
    elif function == "zip" and len(parts) == len(iterable.args):
        if not any(_is_of_run(argument, variables) for argument in iterable.args):
            return
        for part, argument in zip(parts, iterable.args, strict=True):
            values = [variables.get(name) for name in _names_in(argument)]
            if _is_of_run(argument, variables):
                yield from _names_beside(part, argument, variables)
            elif not any(inspect.isgenerator(value) or hasattr(value, "dataset") for value in values):
                yield from _assigned_names(part)
    elif function not in ("enumerate", "zip"):  # a progress bar, say, which hands on what it gets
        yield from _names_beside(target, iterable.args[0], variables)


def _is_of_run(iterable: ast.expr, variables: Mapping[str, Any]) -> bool:
    """Return whether ``iterable`` is an epoch or ``run.epochs()``, or a call that hands on one, as ``tqdm(epoch)``."""
    if isinstance(iterable, ast.Name):
        return isinstance(variables.get(iterable.id), Epoch)
    if isinstance(iterable, ast.Call) and ast.unparse(iterable.func).endswith(".epochs"):
        return True
    if not isinstance(iterable, ast.Call) or not iterable.args or ast.unparse(iterable.func) in ("len", "range"):
        return False
    return _is_of_run(iterable.args[0], variables)


def _counters(loop: ast.For, function: ast.AST) -> Iterator[str]:
    """Yield the variables that the body of ``loop`` increases by a constant, and that ``function`` sets to one."""
    increments = (node for node in ast.walk(ast.Module(loop.body, [])) if isinstance(node, ast.AugAssign))
    targets = (node.target for node in increments if isinstance(node.value, ast.Constant))
    increased = dict.fromkeys(target.id for target in targets if isinstance(target, ast.Name))
    for name in increased:
        values = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and any(name in _names_in(target) for target in node.targets)
        ]
        if values and all(isinstance(value, ast.Constant) for value in values):
            yield name


def _decides(number: str, body: list[ast.stmt], variables: Mapping[str, Any]) -> bool:
    """Return whether ``number``, or what is computed from it, decides how the ``body`` of a loop trains.

    The rules are those in the table at the top of this module.
    """
    nodes = list(ast.walk(ast.Module(body, [])))
    names = _computed_from(number, nodes, _names_in)
    # What a function returns that gets the number may have nothing to do with it, as that of training_step(batch, i).
    factors = _computed_from(number, nodes, lambda value: names_computed_with(value, variables))
    for node in nodes:
        match node:
            case ast.If() if names & set(_names_in(node.test)):
                inner = [part for branch in (*node.body, *node.orelse) for part in ast.walk(branch)]
                if any(_trains(part, variables) or sets_rate(part) for part in inner):
                    return True
            case ast.Assign() | ast.AugAssign() if names & set(_names_in(node.value)):
                if sets_rate(node):
                    return True
            case ast.Call():
                method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                in_arguments = {name for argument in node.args for name in _names_in(argument)}
                steps = method == "step" and _trains(node, variables)
                if names & in_arguments and (steps or _function_sets_rate(node, variables)):
                    return True
                if method == "backward":
                    branches = [
                        branch for branch in nodes if isinstance(branch, ast.If) and branch.lineno < node.lineno
                    ]
                    chosen = {name for branch in branches for name in _chosen_by(factors, branch)}
                    if (factors | chosen) & {*_names_in(node.func), *in_arguments}:
                        return True
            case _:
                pass
    return False


def _computed_from(number: str, nodes: list[ast.AST], names_in: Callable[[ast.AST], Iterator[str]]) -> set[str]:
    """Return ``number`` and the variables that the ``nodes`` compute from it; ``names_in`` finds those in a value."""
    names, num_before = {number}, 0
    while len(names) > num_before:
        num_before = len(names)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AugAssign)) and names & set(names_in(node.value)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _chosen_by(numbers: set[str], branch: ast.If) -> Iterator[str]:
    """Yield the variables to which ``branch`` assigns other values by one of the ``numbers``."""
    if numbers & set(_names_in(branch.test)):
        for node in ast.walk(branch):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def sets_rate(node: ast.AST) -> bool:
    """Return whether ``node`` sets an option of an optimizer's group, as ``group["lr"] = 0.1`` does."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    keys = (target.slice for target in targets if isinstance(target, ast.Subscript))
    return any(isinstance(key, ast.Constant) and key.value in _RATES for key in keys)


def _function_sets_rate(call: ast.Call, variables: Mapping[str, Any]) -> bool:
    """Return whether ``call`` is one of a function that gets an optimizer, and sets an option of its groups."""
    arguments = [variables.get(argument.id) for argument in call.args if isinstance(argument, ast.Name)]
    if not any(isinstance(argument, (Optimizer, LRScheduler)) for argument in arguments):
        return False
    function: Any = None
    if isinstance(call.func, ast.Name):
        function = variables.get(call.func.id)
    elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        function = getattr(variables.get(call.func.value.id), call.func.attr, None)
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    writes = any(instruction.opname == "STORE_SUBSCR" for instruction in dis.get_instructions(code))
    return writes and not _RATES.isdisjoint(constant for constant in code.co_consts if isinstance(constant, str))


def names_computed_with(node: ast.AST, variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the variables from which ``node`` computes a number.

    The arguments of a call count if its function is one of a module, as ``torch.mean``, or of Python for numbers, as
    ``max``; of other calls, the function alone.
    """
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Call):
        function = node.func
        while isinstance(function, ast.Attribute):
            function = function.value
        is_of_module = isinstance(function, ast.Name) and isinstance(variables.get(function.id), ModuleType)
        is_of_numbers = is_of_module or (isinstance(node.func, ast.Name) and node.func.id in _OF_NUMBERS)
        for part in node.args if is_of_numbers else [node.func]:
            yield from names_computed_with(part, variables)
    else:
        for part in ast.iter_child_nodes(node):
            yield from names_computed_with(part, variables)


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names of the variables in the code of ``node``."""
    yield from (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _assigned_names(target: ast.expr) -> Iterator[str]:
    """Yield the names of the variables in a ``target`` of a loop, without objects of which it sets an attribute."""
    yield from (
        inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    )


def _trains(node: ast.AST, variables: Mapping[str, Any]) -> bool:
    """Return whether ``node`` is a call of ``_TRAINING_CALLS``.

    Not only optimizers and schedulers have a method ``step``. What has no state, and no optimizer in it, is something
    else, such as torch's profiler; one of the ``variables`` that is not there yet may be anything.
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TRAINING_CALLS):
        return False
    owner = node.func.value
    if node.func.attr != "step" or not isinstance(owner, ast.Name) or owner.id not in variables:
        return True
    thing = variables[owner.id]
    if isinstance(thing, ModuleType) or hasattr(thing, "state_dict"):
        return True
    return any(isinstance(part, Optimizer) for part in tree_leaves(getattr(thing, "__dict__", {})))
