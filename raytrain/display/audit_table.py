"""What an audit of a run's samples found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.runs.printable import one_line

if TYPE_CHECKING:
    from raytrain.diagnostics.audit import AuditResult, EpochAudit

_COUNTS = ("epoch", "planned", "used_once", "unreadable")
_FAULTS = ("missing", "doubled", "misplaced")
_NUM_FAULTS_SHOWN = 10


def audit_page(result: AuditResult) -> RenderableType:
    """The counts of each epoch and the verdict."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in (*_COUNTS, *_FAULTS):
        table.add_column(name.replace("_", " "), justify="right")
    for epoch in result.epochs:
        counts = [getattr(epoch, name) for name in _COUNTS] + [len(getattr(epoch, fault)) for fault in _FAULTS]
        table.add_row(*(f"{count:,}" for count in counts))
    return Group(table, *_verdict(result))


def _verdict(result: AuditResult) -> list[Text]:
    steps = f"steps {result.first_step:,} to {result.last_step:,}"
    if result.clean:
        return [Text(f"Every readable sample was used exactly once per epoch, in its step ({steps}).", style="green")]
    faults = [line for epoch in result.epochs for line in _faults(epoch)]
    verdict = Text(f"Some samples were not used exactly once per epoch, in their step ({steps}):", style="red")
    num_more = len(faults) - _NUM_FAULTS_SHOWN
    more = [Text(f"  and {num_more:,} more; --json lists them all")] if num_more > 0 else []
    return [verdict, *faults[:_NUM_FAULTS_SHOWN], *more]


def _faults(epoch: EpochAudit) -> list[Text]:
    return [
        Text(f"  {fault} in epoch {epoch.epoch}: {one_line(key)}") for fault in _FAULTS for key in getattr(epoch, fault)
    ]
