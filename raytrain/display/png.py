"""What all figures share: their colours, their plain axes, and the PNG file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from raytrain.storage.open import check_output, write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, LIGHT = "#666666", "#f1f3f6"
BLUE, ORANGE = "#1f6fb4", "#e8710a"
_DPI = 120


def save_png(figure: Figure, output: str) -> None:
    """Write ``figure`` to a file or an ``s3://`` object. Raises UsageError if its name does not end in ``.png``."""
    check_output(output, (".png",), "--png")
    write_output(output, png_bytes(figure))


def png_bytes(figure: Figure) -> bytes:
    """``figure`` as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


def plain_axes(axes: Axes) -> None:
    """Keep of the frame what helps to read the plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=6)
