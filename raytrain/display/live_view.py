"""The part of a terminal that is redrawn all the time; if the output is not a terminal, there is no such part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner

from raytrain.display.console import PlainConsole
from raytrain.display.formatting import one_line

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class LiveView:
    """Base class of the views of a run and of a sweep: a context manager that owns a part of the terminal.

    Args:
        console: where to print, by default standard output. If it is a terminal, the view redraws a picture in place;
            otherwise, it prints plain lines.
        waiting: what is shown until there is a picture.
    """

    def __init__(self, console: Console | None, waiting: str) -> None:
        self._console = console or PlainConsole()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(Spinner("dots", waiting), console=self._console, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        """Print a line as it is, without wrapping it; a live picture stays below it."""
        self._console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def _draw(self, picture: RenderableType, *, keep: bool) -> None:
        """Draw ``picture`` in place of the last one; with ``keep``, it stays on the screen when the view ends."""
        assert self._live is not None
        self._live.transient = not keep
        self._live.update(picture, refresh=True)
