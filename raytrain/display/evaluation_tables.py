"""What an evaluation found: accuracy and loss, the classes, the confusions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.formatting import format_optional, one_line
from raytrain.display.key_value_table import key_value_table

if TYPE_CHECKING:
    from raytrain.inference.classification_metrics import ClassScore
    from raytrain.inference.evaluate import EvaluationResult

_NUM_CLASSES_SHOWN = 20
_BAR_WIDTH = 16


def evaluation_page(result: EvaluationResult, picture: str | None = None) -> RenderableType:
    """The metrics, the classes from the worst on, and the most frequent confusions.

    ``picture`` is the file of the confusion matrix, if there is one.
    """
    tables = Columns([_classes(result.per_class), _confusions(result)], padding=(0, 4))
    return Group(key_value_table({**result.summary(), "picture": picture}), Text(), tables)


def _classes(scores: Sequence[ClassScore]) -> RenderableType:
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "correct", "accuracy"):
        table.add_column(name, justify="right")
    table.add_column(width=_BAR_WIDTH)
    worst_first = sorted(scores, key=lambda score: math.inf if score.accuracy is None else score.accuracy)
    for score in worst_first[:_NUM_CLASSES_SHOWN]:
        bar = Bar(1, 0, score.accuracy or 0, width=_BAR_WIDTH, color="cyan")
        table.add_row(
            Text(one_line(score.name)),
            f"{score.images:,}",
            f"{score.right:,}",
            format_optional(score.accuracy, ".4f"),
            bar,
        )
    num_more = len(scores) - _NUM_CLASSES_SHOWN
    if num_more <= 0:
        return table
    return Group(table, Text(f" and {num_more:,} better classes; --json lists them all", style="dim"))


def _confusions(result: EvaluationResult) -> RenderableType:
    if not result.confusions:
        return Text("\nNo image was misclassified.")
    table = Table("true class", "predicted", box=box.SIMPLE_HEAD)
    table.add_column("images", justify="right")
    table.add_column("of the class", justify="right")
    sizes = {score.name: score.images for score in result.per_class}
    for confusion in result.confusions:
        fraction = confusion.images / sizes[confusion.truth]
        table.add_row(
            Text(one_line(confusion.truth)),
            Text(one_line(confusion.answer)),
            f"{confusion.images:,}",
            f"{fraction:.1%}",
        )
    return table
