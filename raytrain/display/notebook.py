"""A run in a notebook: live curves or the terminal's picture below the cell while it trains."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.text import Text

from raytrain.display.console import PlainConsole
from raytrain.display.dashboard import dashboard
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.background_and_throttle import Throttle
from raytrain.runs.metrics_history import sample_of_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raytrain.display.page.widget import RunWidget

WAITING = "reading the data, starting the workers …"
_WIDTH = 110
_PICTURE_EVERY_S = 1.0  # a notebook draws more slowly than a terminal
_STYLE = "font: 12px/1.15 Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre; overflow-x: auto"
_DOTS = re.compile("[\u2801-\u28ff]")
_CELL = "display:inline-block; width:1ch; overflow:hidden; vertical-align:bottom; font-style:normal"
INTERRUPT = "interrupt the kernel to stop with a checkpoint"
"""What stops a run of a cell, shown in place of what Ctrl-C does."""
_STOP = "stop() of the handle stops with a checkpoint"


class CellOutput:
    """The output of a notebook's cell, with the methods of rich's Live. It shows one picture at a time.

    The first picture is the ``widget``, or the text ``waiting`` if there is none.
    """

    transient = False  # rich's Live has it; here, the last picture always stays

    def __init__(self, waiting: str, widget: RunWidget | None = None) -> None:
        self._waiting, self._widget = waiting, widget
        self._is_first = True  # nothing but the first picture was shown

    def start(self, refresh: bool = True) -> None:
        """Show the first picture."""
        from IPython.display import HTML, display

        self._display: Any = display(self._widget or HTML(as_html(Text(self._waiting))), display_id=True)

    def update(self, picture: RenderableType, refresh: bool = True) -> None:
        """Show ``picture`` in place of the one before."""
        from IPython.display import HTML

        self._is_first = False
        self._display.update(HTML(as_html(picture)))

    def stop(self) -> None:
        """Leave the last picture as it is, but remove the first one: the run was refused, and waits for nothing."""
        if self._is_first:
            self.update(Text(""))


class NotebookView:
    """Shows one run in the output of the cell that made the view: ``view.update(snapshot)``, from any thread.

    While the run trains, the cell shows a widget, or the terminal's picture if anywidget is not installed. At the end
    it shows the picture in either case, which a saved notebook keeps. The widget's Stop button calls ``stop``.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._widget: RunWidget | None = None
        with suppress(ImportError):  # the extra `notebook` is not installed
            from raytrain.display.page.widget import RunWidget

            self._widget = RunWidget(stop)
        self._output = CellOutput(WAITING, self._widget)
        self._output.start()
        self._rows = sample_of_rows()
        self._throttle = Throttle()
        self._over = False  # the last snapshot was that of a run that has ended

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, which continues the one before (see :class:`Snapshot`).

        It is drawn at most once a second, and whenever the run is over.
        """
        # The widget takes every snapshot, but sends its state to the browser only when it draws.
        self._rows.follow(snapshot.first_row, snapshot.rows)
        self._over = snapshot.over
        if self._widget is not None:
            self._widget.update(snapshot)
        if not (self._throttle.due("picture", _PICTURE_EVERY_S) or self._over):
            return
        if self._widget is not None and not self._over:
            self._widget.draw()
        else:
            self._keep(dashboard(snapshot, self._rows.rows, hint=_STOP))

    def fail(self, error: BaseException) -> None:
        """Show ``error``, unless the last picture shows already how the run has ended."""
        if not self._over:
            self._keep(Text(str(error)))

    def _keep(self, picture: RenderableType) -> None:
        """Show ``picture``, which the saved notebook keeps, in place of the widget."""
        self._output.update(picture)
        if self._widget is not None:
            self._widget.close()


def as_html(page: RenderableType) -> str:
    """Return a page of the terminal as HTML, with its colours, 110 characters wide."""
    console = PlainConsole(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    console.print(page, soft_wrap=isinstance(page, Text))  # a sentence is not cut in the middle of a path
    html = console.export_html(inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>')
    # Few fonts have braille dots. The browser takes them from another font, whose width would break the lines, so each
    # gets a box as wide as a character. A braille cell without dots becomes a space, which needs no box.
    return _DOTS.sub(rf'<i style="{_CELL}">\g<0></i>', html.replace("\u2800", " "))


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook, which has imported IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
