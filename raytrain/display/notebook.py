"""A run in a notebook: the terminal's picture below the cell, redrawn while the run trains, and :func:`start`."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.backends.handle import RunHandle
from raytrain.display.console import PlainConsole
from raytrain.display.dashboard import dashboard
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.snapshot import Snapshot, View
from raytrain.runs.trackers.protocol import Tracker

if TYPE_CHECKING:
    from raytrain.config import TrainConfig
    from raytrain.training.run import Run

_WIDTH = 110
_STYLE = "font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; line-height: 1.15; overflow-x: auto"


def start(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    trackers: Sequence[str | Tracker] = (),
) -> RunHandle:
    """As :func:`raytrain.train`, but return at once, with a handle of the run.

    Args:
        config: the options.
        loop: a training loop of your own.
        view: called about twice a second with the run's :class:`Snapshot`. By default, in a notebook, it draws the
            run's picture below the cell.
        trackers: as for :func:`raytrain.train`.
    """
    return RunHandle(config, loop, view or _default_view(), trackers)


class NotebookView:
    """Shows one run in the output of the cell that made the view: ``view.update(snapshot)``, from any thread.

    Args:
        interval_s: seconds between pictures; a notebook draws more slowly than a terminal.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import HTML, display

        waiting = HTML("<pre>reading the data, starting the workers …</pre>")
        self._display: Any = display(waiting, display_id=True)
        self._interval_s = interval_s
        self._clock = clock
        self._rows: list[MetricRow] = []
        self._next_picture_s = clock()

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which continues the one before (see :class:`Snapshot`)."""
        from IPython.display import HTML

        self._rows[snapshot.first_row :] = snapshot.rows
        if self._clock() >= self._next_picture_s or snapshot.over:
            self._next_picture_s = self._clock() + self._interval_s
            self._display.update(HTML(dashboard_html(snapshot, self._rows)))


def dashboard_html(snapshot: Snapshot, rows: list[MetricRow]) -> str:
    """The picture of a run as HTML, with its colours."""
    console = PlainConsole(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    console.print(dashboard(snapshot, rows))
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>')


def _default_view() -> View | None:
    """A view if this process is the kernel of a notebook."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    if getattr(get_ipython(), "kernel", None) is None:
        return None
    return NotebookView().update
