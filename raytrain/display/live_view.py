"""The part of a terminal that is drawn anew all the time; nothing where output is no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class LiveView:
    """What the views of a run and of a sweep have in common: ``with`` one of them, the terminal shows it, and has it back in the end.

    Args:
        console: where to; by default standard output. Its ``is_terminal`` decides between the live view and plain lines.
        waiting: what is shown until there is something to draw.
    """

    def __init__(self, console: Console | None, waiting: str) -> None:
        self._console = console or Console()
        self._live = Live(Spinner("dots", waiting), console=self._console, transient=True) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self, picture: RenderableType, *, stays: bool) -> None:
        """Draw ``picture``, which ``stays`` on the screen in the end or does not."""
        assert self._live is not None
        self._live.transient = not stays
        self._live.update(picture, refresh=True)
