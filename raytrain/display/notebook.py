"""A run in a notebook: the terminal's picture below the cell, drawn anew as the run goes on."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from raytrain.display.terminal import dashboard
from raytrain.runs.history import Row
from raytrain.runs.monitor import Snapshot

_WIDTH = 110
_STYLE = "font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; line-height: 1.15; overflow-x: auto"


class NotebookView:
    """Shows one run in the output of the cell that made the view: ``view.update(snapshot)``, from any thread.

    Args:
        interval_s: seconds between pictures, which a notebook keeps slower than a terminal does.
        clock: seconds that only go forward.
    """

    def __init__(self, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import HTML, display

        self._display: Any = display(HTML("<pre>looking at the data, starting the workers …</pre>"), display_id=True)
        self._interval_s = interval_s
        self._clock = clock
        self._rows: list[Row] = []
        self._next = clock()

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which was asked for with the ``cursor`` of the one before."""
        from IPython.display import HTML

        self._rows[snapshot.first_row :] = snapshot.rows
        if self._clock() >= self._next or snapshot.over:
            self._next = self._clock() + self._interval_s
            self._display.update(HTML(picture(snapshot, self._rows)))


def picture(snapshot: Snapshot, rows: list[Row]) -> str:
    """The whole picture of a run as HTML, with its colours."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    console.print(dashboard(snapshot, rows))
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>')
