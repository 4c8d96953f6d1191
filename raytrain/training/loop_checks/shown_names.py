"""Finds counters that are only shown, such as a number of steps that a loop prints, by the text of the code.

A resume begins them again, which changes nothing but a line on the screen. Shown is what ``print``, a logger or a
progress bar gets, alone or after arithmetic, also if an ``if`` decides whether. What anything else gets, such as a
function of the user's, a comparison before a training step, or the name of a file, counts as used.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from contextlib import suppress

from raytrain.training.loop_checks.reached_code import NO_SOURCE

_SHOWING = {"print", "debug", "info", "warning", "set_description", "set_description_str", "set_postfix"}
_SHOWING_TEXT = {*_SHOWING, "log"}
_OF_NUMBERS = {"float", "int", "abs", "min", "max", "round", "str", "format"}  # functions without an effect
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.Dict, ast.keyword)


def is_shown_counter(name: str, files: Iterable[str], line: int | None = None) -> bool:
    """Return whether the code in ``files`` sets ``name`` to constants, adds to it, and reads it only to show it.

    A name with a dot is that of an attribute, of any object. With a ``line``, only the function counts that has it,
    with functions within it. False if a text is not known.

    Example: ``is_shown_counter("self.num_steps", ["loop.py"])``
    """
    _, dot, last = name.rpartition(".")
    # The code of <string> is generated, as that of a dataclass.
    texts = ["".join(linecache.getlines(file)) for file in files if file != "<string>"]
    with suppress(*NO_SOURCE):
        uses = [_Uses(ast.parse(text), line) for text in texts]
        return all(texts) and all(of_file.is_counter(dot + last) and of_file.are_shown(dot + last) for of_file in uses)
    return False


class _Uses:
    """The code of a file, or of the function in it that has a ``line``, and what each node is a part of."""

    def __init__(self, tree: ast.Module, line: int | None) -> None:
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        around = (node for node in functions if line and node.lineno <= line <= (node.end_lineno or line))
        self._nodes = list(ast.walk(next(around, tree)))  # the outermost function comes first
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._searched: set[str] = set()

    def is_counter(self, name: str) -> bool:
        """Return whether each assignment to ``name`` is one of a constant, or adds to it."""
        uses = [node for node in self._nodes if _name_of(node) == name]
        statements = [self._parents[node] for node in uses if isinstance(getattr(node, "ctx", None), ast.Store)]
        return all(
            isinstance(statement, ast.AugAssign)
            or (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant))
            for statement in statements
        )

    def are_shown(self, name: str) -> bool:
        """Return whether each use of ``name`` shows it, or computes what is only shown."""
        if name in self._searched:
            return True
        self._searched.add(name)
        return all(self._is_shown(node) for node in self._nodes if _name_of(node) == name)

    def _is_shown(self, node: ast.AST) -> bool:
        """Return whether the ``node``, a use of a name, shows its value, or computes what is only shown."""
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            return True
        # Go up to the call that gets the value, or to the statement.
        above, is_text = self._parents[node], False
        while isinstance(above, (*_ARITHMETIC, ast.JoinedStr, ast.FormattedValue)) or _called(above) in _OF_NUMBERS:
            is_text |= isinstance(above, ast.JoinedStr)
            node, above = above, self._parents[above]
        if isinstance(above, ast.Call):
            return node is not above.func and _called(above) in (_SHOWING_TEXT if is_text else _SHOWING)
        if isinstance(above, ast.If):
            return all(map(self._shows, (*above.body, *above.orelse)))
        return self._shows(above)

    def _shows(self, statement: ast.AST) -> bool:
        """Return whether a ``statement`` has no other effect than to show something, or to compute it."""
        if isinstance(statement, ast.If):
            return all(map(self._shows, (*statement.body, *statement.orelse)))
        if isinstance(statement, ast.Expr):
            return _called(statement.value) in _SHOWING_TEXT
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [_name_of(target) for target in targets]
            return all(name is not None and self.are_shown(name) for name in names)
        return isinstance(statement, ast.Pass)


def _name_of(node: ast.AST) -> str | None:
    """Return the name of a variable, or a dot and that of an attribute; None for any other ``node``."""
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _called(node: ast.AST) -> str | None:
    """Return the name of the function or method that ``node`` calls; None if it is no call."""
    return (_name_of(node.func) or "").lstrip(".") if isinstance(node, ast.Call) else None
