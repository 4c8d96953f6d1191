"""Finds the number of a batch, of ``enumerate``, by which a loop decides when an optimizer steps.

A resume enters in the middle of an epoch, where such a number begins at 0 again. Loops that add up gradients then step
after other batches, and not after the last one of the epoch. A number that is only printed does no harm, so the text of
the loop is searched for what it decides.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FrameType, ModuleType

from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from raytrain.training.loop_checks.loop_source import NO_SOURCE

_TRAINING_CALLS = {"step", "zero_grad", "backward", "unscale_", "update_parameters", "no_sync"}  # names of methods


def number_that_decides(frame: FrameType) -> str | None:
    """Return the name of the variable with the number of a batch by which the loop decides; None if there is none.

    ``frame`` is that of the function that asks for a batch, in the line of its ``for``. None also if the text of the
    function is not known.

    Example: ``i`` in ``for i, batch in enumerate(epoch):`` with ``if i % 2: optimizer.step()``.
    """
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except NO_SOURCE:
        return None
    # The tree counts the lines from the function's first one; of a module, inspect says that this is line 0.
    line = frame.f_lineno - max(first, 1) + 1
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno):
            is_numbered = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "enumerate"
            number = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
            if is_numbered and isinstance(number, ast.Name) and _decides(number.id, loop.body, frame):
                return number.id
    return None


def _decides(number: str, body: list[ast.stmt], frame: FrameType) -> bool:
    """Return whether ``number``, or what is computed from it, decides on a training call in the ``body`` of a loop.

    It does in an ``if`` with such a call, and as an argument of a method ``step``, as of a scheduler. ``frame`` has the
    variables of the loop.
    """
    names = {number}  # of variables that depend on the number
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Assign) and names & set(_names_in(node.value)):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If) and names & set(_names_in(node.test)):
            calls = (call for branch in (*node.body, *node.orelse) for call in ast.walk(branch))
            if any(_trains(call, frame) for call in calls):
                return True
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".step") and _trains(node, frame):
            in_arguments = {name for argument in node.args for name in _names_in(argument)}
            if names & in_arguments:
                return True
    return False


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names of the variables in the code of ``node``."""
    yield from (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _trains(node: ast.AST, frame: FrameType) -> bool:
    """Return whether ``node`` is a call of ``_TRAINING_CALLS``.

    Not only optimizers and schedulers have a method ``step``. What has no state, and no optimizer in it, is something
    else, such as torch's profiler; a variable of ``frame`` that is not there yet may be anything.
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TRAINING_CALLS):
        return False
    owner = node.func.value
    variables = {**frame.f_globals, **frame.f_locals}
    if node.func.attr != "step" or not isinstance(owner, ast.Name) or owner.id not in variables:
        return True
    thing = variables[owner.id]
    if isinstance(thing, ModuleType) or hasattr(thing, "state_dict"):
        return True
    return any(isinstance(part, Optimizer) for part in tree_leaves(getattr(thing, "__dict__", {})))
