"""Names and values, one pair on each line."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table

from raytrain.display.formatting import format_value
from raytrain.runs.printable import one_line


def key_value_table(values: Mapping[str, object]) -> RenderableType:
    """The plain values among ``values``. None, lists, tuples and dictionaries are left out: ``--json`` has those."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for name, value in values.items():
        if value is not None and not isinstance(value, (list, tuple, dict)):
            grid.add_row(one_line(name.removeprefix("num_").replace("_", " ")), format_value(value))
    return grid
