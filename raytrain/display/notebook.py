"""A run in a notebook: live curves or the terminal's picture below the cell while it trains, and :func:`start`."""

from __future__ import annotations

import html
import io
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.display.console import PlainConsole
from raytrain.display.dashboard import dashboard
from raytrain.launch.train import RunHandle
from raytrain.monitor.snapshot import Snapshot, View
from raytrain.runs.history import sample_of_rows
from raytrain.trackers.tracker import Tracker

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raytrain.config import TrainConfig
    from raytrain.display.page.widget import RunWidget
    from raytrain.training.run import Run

_WIDTH = 110
_STYLE = "font: 12px/1.15 Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre; overflow-x: auto"


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
        view: called about twice a second with the run's :class:`Snapshot`. By default, in a notebook, it draws the run
            below the cell: with the extra ``raytrain[notebook]`` as live curves with a Stop button.
        trackers: as for :func:`raytrain.train`.
    """
    if view is not None or not is_notebook():
        return RunHandle(config, loop, view, trackers)
    shown = NotebookView(stop=lambda: handle.stop("the Stop button in the notebook"))
    handle = RunHandle(config, loop, shown.update, trackers, shown.fail)
    return handle


class NotebookView:
    """Shows one run in the output of the cell that made the view: ``view.update(snapshot)``, from any thread.

    While the run trains, it is a widget, or the terminal's picture if anywidget is not installed or nobody can stop
    the run. In the end it is the picture, which stays in the saved notebook.

    Args:
        stop: what the widget's Stop button calls.
        interval_s: seconds between pictures; a notebook draws more slowly than a terminal.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        stop: Callable[[], None] | None = None,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from IPython.display import HTML, display

        self._widget = _widget(stop) if stop else None
        waiting = HTML("<pre>reading the data, starting the workers …</pre>")
        self._display: Any = display(self._widget or waiting, display_id=True)
        self._interval_s = interval_s
        self._clock = clock
        self._rows = sample_of_rows()
        self._next_picture_s = clock()
        self._over = False

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which continues the one before (see :class:`Snapshot`)."""
        self._rows.follow(snapshot.first_row, snapshot.rows)
        self._over = snapshot.over
        if self._widget is not None:
            self._widget.update(snapshot)
        if self._over or self._clock() >= self._next_picture_s:
            self._next_picture_s = self._clock() + self._interval_s
            self._draw(snapshot)

    def fail(self, error: BaseException) -> None:
        """Show why the run has ended, unless its last picture does."""
        if not self._over:
            self._keep(f"<pre>{html.escape(str(error))}</pre>")

    def _draw(self, snapshot: Snapshot) -> None:
        if self._widget is not None and not snapshot.over:
            self._widget.draw()
        else:
            self._keep(as_html(dashboard(snapshot, self._rows.rows)))

    def _keep(self, picture: str) -> None:
        """Show ``picture``, which the saved notebook keeps, in place of the widget."""
        from IPython.display import HTML

        self._display.update(HTML(picture))
        if self._widget is not None:
            self._widget.close()


def as_html(page: RenderableType) -> str:
    """What the terminal shows, as HTML, with its colours."""
    console = PlainConsole(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    console.print(page)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>')


def _widget(stop: Callable[[], None]) -> RunWidget | None:
    """A widget if the extra ``notebook`` is installed."""
    try:
        from raytrain.display.page.widget import RunWidget
    except ImportError:
        return None
    return RunWidget(stop)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
