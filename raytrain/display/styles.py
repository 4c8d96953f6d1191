"""Colours in the terminal: of a run's status, and of runs that are shown side by side."""

from __future__ import annotations

from collections.abc import Sequence

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
