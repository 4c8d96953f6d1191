"""Where the time of a step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from raytrain.diagnostics.profile import ProfileResult


def profile_page(result: ProfileResult) -> RenderableType:
    """A line for each phase, the advice, and where the traces are."""
    table = Table("phase", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("ms", "share", "slowest worker"):
        table.add_column(heading, justify="right")
    for name, seconds in result.phases.items():
        times = [worker[name] for worker in result.workers]
        slowest = f"{1000 * max(times):,.1f} ms (worker {times.index(max(times))})"
        table.add_row(name, f"{1000 * seconds:,.1f}", f"{seconds / result.step_s:.0%}", slowest)
    table.add_section()
    table.add_row("a step", f"{1000 * result.step_s:,.1f}", "100%", "")
    traces = Text("Traces, for chrome://tracing or https://ui.perfetto.dev:\n  " + "\n  ".join(result.traces), "dim")
    return Group(table, Text(result.advice, "bold"), Text(), traces)
