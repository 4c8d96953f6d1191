"""What happened to a run, line by line."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.display.formatting import format_duration, one_line
from raytrain.runs.snapshot import Snapshot


def log_page(snapshot: Snapshot) -> RenderableType:
    """The events of a run with their seconds of training, and why it failed."""
    lines = [f"{format_duration(event.at_s)}  {one_line(event.text)}" for event in snapshot.events]
    error = snapshot.result and snapshot.result.error
    lines += [one_line(error)] if error else []
    return Group(*(Text(line, overflow="fold") for line in lines)) if lines else Text("Nothing has happened yet.")
