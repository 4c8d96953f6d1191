"""What an evaluation found: accuracy and loss, the classes, the confusions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.formatting import format_value
from raytrain.display.key_value_table import key_value_table

_NUM_CLASSES_SHOWN = 20
_BAR_WIDTH = 16


def evaluation_page(result: Mapping[str, Any]) -> RenderableType:
    """What :func:`raytrain.evaluate` returns: the classes from the worst on, and the most frequent confusions."""
    tables = Columns([_classes(result["per_class"]), _confusions(result)], padding=(0, 4))
    return Group(key_value_table(result), Text(), tables)


def _classes(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "correct", "accuracy"):
        table.add_column(name, justify="right")
    table.add_column(width=_BAR_WIDTH)
    worst_first = sorted(rows, key=lambda row: math.inf if row["accuracy"] is None else row["accuracy"])
    for row in worst_first[:_NUM_CLASSES_SHOWN]:
        bar = Bar(1, 0, row["accuracy"] or 0, width=_BAR_WIDTH, color="cyan")
        counts = f"{row['images']:,}", f"{row['right']:,}"
        table.add_row(Text(row["class"]), *counts, format_value(row["accuracy"]), bar)
    num_more = len(rows) - _NUM_CLASSES_SHOWN
    if num_more <= 0:
        return table
    return Group(table, Text(f" and {num_more:,} better classes; --json lists them all", style="dim"))


def _confusions(result: Mapping[str, Any]) -> RenderableType:
    if not result["confusions"]:
        return Text("\nNo image was misclassified.")
    table = Table("true class", "predicted", box=box.SIMPLE_HEAD)
    table.add_column("images", justify="right")
    table.add_column("of the class", justify="right")
    sizes = {row["class"]: row["images"] for row in result["per_class"]}
    for row in result["confusions"]:
        fraction = row["images"] / sizes[row["truth"]]
        table.add_row(Text(row["truth"]), Text(row["answer"]), f"{row['images']:,}", f"{fraction:.1%}")
    return table
