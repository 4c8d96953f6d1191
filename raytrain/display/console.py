"""The console, which no text from outside can control, and its colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raytrain.runs.redact import printable

_STATUS_STYLES = {
    "waiting": "dim",
    "starting": "yellow",
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
}
_RUN_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")


def status_style(status: str) -> str:
    """The colour of a status; red for one that nobody wishes, such as interrupted."""
    return _STATUS_STYLES.get(status, "red")


def run_styles(runs: Sequence[object]) -> list[str]:
    """A colour for each of ``runs``; from the seventh on, colours repeat."""
    return [_RUN_STYLES[number % len(_RUN_STYLES)] for number in range(len(runs))]


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
