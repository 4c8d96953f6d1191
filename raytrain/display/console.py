"""The console that everything is printed on: no text from outside can control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raytrain.runs.printable import printable


class PlainConsole(Console):
    """A rich console that knows no markup and no emoji codes, and shows control characters instead of sending them.

    Names of runs, classes and images, and what a server says, may hold any text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See :meth:`rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
