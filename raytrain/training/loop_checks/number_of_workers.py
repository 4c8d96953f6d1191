"""Finds learning rates and losses that a loop computes with the number of workers, as for DistributedDataParallel.

There, a batch is that of one process. N processes have N times as many images, so scripts multiply the learning rate by
N (Goyal et al. 2017), and divide a loss by N before they add it up. A run's batch is that of all workers, and a mean
over one worker's images is weighted by the run: either would change what the loop computes with the number of workers.
The text of the loop and of the user's functions that it calls shows it, in the order of the lines.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from raytrain.config.user_code import line_of
from raytrain.training.loop_checks.numbered_batches import names_computed_with, sets_rate
from raytrain.training.loop_checks.reached_code import own_code, text_of
from raytrain.training.loop_checks.searching import searching

_RATE_NOTE = (
    "a learning rate is computed with the number of workers ({line}), as for DistributedDataParallel, whose batch is "
    "that of one process; a run's --batch-size is that of all workers, so leave this out unless the batch grows with "
    "them, too, as by --batch-size 32/worker"
)
_LOSS_NOTE = (
    "a loss is computed with the number of workers ({line}), so that the result depends on it: a run weights the mean "
    "over each worker's images by itself, so let the loss be the mean, as in a loop for one GPU"
)
_RATES = {"lr", "max_lr", "base_lr", "learning_rate"}  # names of variables and arguments
_NUMBER = "world_size"  # of workers: as an attribute, a variable or what get_world_size() returns


def notes_on_number_of_workers(loop: Callable[..., Any]) -> Iterator[str]:
    """Yield a note for each line of ``loop`` that computes a learning rate or a loss with the number of workers.

    Functions whose text is not known are left out.

    Example: a note for ``SGD(model.parameters(), lr=0.1 * run.world_size)``
    """
    for code, namespace in own_code(loop):
        notes = list[str]()
        with searching("whether a rate or a loss is computed with the number of workers"):
            lines, first = text_of(code)
            tree = _WithNumber().visit(ast.parse(textwrap.dedent("".join(lines))))
            uses = _uses(tree, namespace)
            notes = [note.format(line=line_of(code.co_filename, first + number - 1)) for note, number in uses]
        yield from notes


class _WithNumber(ast.NodeTransformer):
    """Puts the name ``world_size`` in the place of ``run.world_size`` and ``torch.distributed.get_world_size()``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(_NUMBER, node.ctx) if node.attr == _NUMBER else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_number = ast.unparse(node.func).rpartition(".")[2] == "get_world_size"
        return ast.Name(_NUMBER, ast.Load()) if is_number else self.generic_visit(node)


def _uses(function: ast.AST, namespace: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield a note, and the number of the line in ``function``, for each learning rate and each loss."""
    names = {_NUMBER}  # of what was computed with the number of workers, up to a line

    def is_computed(value: ast.AST) -> bool:
        return not names.isdisjoint(names_computed_with(value, namespace))

    statements = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AugAssign, ast.Call))]
    for node in sorted(statements, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            is_backward = isinstance(node.func, ast.Attribute) and called == "backward"
            is_loss = is_backward and any(map(is_computed, [node.func, *node.args]))
            rates = [keyword.value for keyword in node.keywords if keyword.arg in _RATES]
            rates += node.args[1:2] if hasattr(torch.optim, called) else []
            if is_loss or any(map(is_computed, rates)):
                yield _LOSS_NOTE if is_loss else _RATE_NOTE, node.lineno
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        assigned = {ast.unparse(target) for target in targets}
        if is_computed(node.value):
            names |= assigned
            if sets_rate(node) or any(name.rpartition(".")[2] in _RATES for name in assigned):
                yield _RATE_NOTE, node.lineno
        elif isinstance(node, ast.Assign):
            names -= assigned - {_NUMBER}
