"""The page of a run as a widget in a notebook: the same curves, the same Stop button. Needs anywidget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files

import anywidget
import traitlets

from raytrain.display.page.feed import FeedCursor, RunFeed
from raytrain.monitor.snapshot import Snapshot

_STATIC = files("raytrain.display.page") / "static"
_VIEWS = "chart.js", "stop_panel.js", "evaluation_view.js", "machines.js", "run_view.js"
_MODULES = ("format.js", "curves.js", *_VIEWS, "widget.js")
"""The modules of the page that a widget needs, each after those that it imports."""
_TEXTS = {name: (_STATIC / name).read_text("utf-8") for name in ("uPlot.iife.min.js", *_MODULES)}


class RunWidget(anywidget.AnyWidget):
    """A run as a widget, whose Stop button calls ``stop``.

    Its state is one message with everything, so that a browser that opens the notebook later has the whole run.
    """

    # A widget is loaded from one text, and there is no build step: the modules are joined, without import and export.
    _esm = "\n".join(
        [re.sub(r"^import .*$|^export (?=\w)", "", text, flags=re.MULTILINE) for text in _TEXTS.values()]
        + ["export default { render };"]
    )
    _css = "".join((_STATIC / name).read_text("utf-8") for name in ("uPlot.min.css", "page.css"))
    message = traitlets.Dict().tag(sync=True)

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._feed = RunFeed("")
        self.on_msg(lambda widget, content, buffers: stop())

    def __repr__(self) -> str:
        """Return the text that a notebook without widgets shows until the run is over."""
        return "The live view of the run cannot be shown here: JupyterLab needs anywidget in its own environment."

    def update(self, snapshot: Snapshot) -> None:
        """Take ``snapshot``, which continues the one before (see :class:`Snapshot`); :meth:`draw` shows it."""
        self._feed.name = snapshot.name
        self._feed.update(snapshot)

    def draw(self) -> None:
        """Send the state of the run to all browsers that show the widget."""
        message, _ = self._feed.since(FeedCursor())
        if message is not None:
            self.message = json.loads(message)
