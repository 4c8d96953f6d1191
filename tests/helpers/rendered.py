"""Terminal views as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def text(renderable: RenderableType, width: int = 110) -> str:
    console = Console(width=width, height=50, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()
