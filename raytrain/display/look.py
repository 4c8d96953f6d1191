"""`raytrain.look`: what a data set has, also below the cell of a notebook."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from raytrain.diagnostics.look import LookResult, look_at
from raytrain.display.look_figure import look_figure
from raytrain.display.look_tables import look_page
from raytrain.display.notebook import as_html, is_notebook
from raytrain.display.png import png_bytes

if TYPE_CHECKING:
    from raytrain.config import TrainConfig


def look(config: TrainConfig, *, limit_s: float = 30.0) -> LookResult:
    """Look at the images that a run with these options would be trained and tested on. Trains nothing.

    In a notebook, the first images as the network sees them and what was found are shown below the cell.

    Args:
        config: the options of the run.
        limit_s: seconds after which no more files are read; the result says how many were.

    Raises:
        UsageError, StorageError: the data cannot be read, or no run could start with it.
    """
    result = look_at(config, limit_s=limit_s)
    if is_notebook():
        from IPython.display import HTML, display

        display(HTML(look_html(result)))
    return result


def look_html(result: LookResult) -> str:
    """The figure and the tables as HTML."""
    picture = base64.b64encode(png_bytes(look_figure(result))).decode()
    return f'<img src="data:image/png;base64,{picture}">{as_html(look_page(result))}'
