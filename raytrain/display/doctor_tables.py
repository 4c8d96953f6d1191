"""What the doctor shows in the terminal: a table of the nodes, and each trouble with what to do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.backends.ray.cluster import Placement
from raytrain.diagnostics.node_probe import NodeReport
from raytrain.display.tables import facts

if TYPE_CHECKING:
    from raytrain.diagnostics.doctor import DoctorReport, Finding, Node

_NODES_NAMED = 3


def doctor_page(report: DoctorReport) -> RenderableType:
    """The whole page."""
    about = {
        "versions": " · ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items()),
        "data": report.data,
        "storage": report.storage,
        "--workers auto": report.placement and _shown_placement(report.placement),
    }
    return Group(facts(about), _table(report), _shown_troubles(report))


def _table(report: DoctorReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("node", no_wrap=True)
    for heading in ("CPUs, memory,\nobject store", "GPUs", "reads the\ndata", "writes the\nstorage", "credentials"):
        table.add_column(heading)
    for node in report.nodes:
        table.add_row(
            f"{node.address}\n{node.id}",
            f"{cpus(node.cpus)}\n{size(node.memory_bytes)}\n{size(node.object_store_bytes)}",
            _shown_gpus(node),
            *_shown_answer(node.answer, asked=report.data is not None),
        )
    return table


def _shown_gpus(node: Node) -> str:
    if node.answer is None or not node.answer.gpus:
        return f"{node.gpus:g}"
    return "\n".join(
        f"{count} × {gpu.name.removeprefix('NVIDIA ')}\n{size(gpu.memory_bytes)}\ndriver {gpu.driver}"
        for gpu, count in Counter(node.answer.gpus).items()
    )


def _shown_answer(answer: NodeReport | None, *, asked: bool) -> tuple[RenderableType, RenderableType, str]:
    if answer is None:
        return Text("no answer", "red"), Text("no answer", "red"), ""
    reading, writes = answer.reading, Text("yes", "green") if answer.writable else Text("no", "red")
    if reading is None:
        return Text("no", "red") if asked else Text("not asked", "dim"), writes, answer.identity or "none needed"
    speed = f"{reading.images_per_s:,.0f} images/s\n{reading.bytes_per_s / 1e6:,.1f} MB/s\nlisted: {reading.listing_s:.2f} s"
    return Text(speed, "green"), writes, answer.identity or "none needed"


def _shown_placement(placement: Placement) -> str:
    return f"{workers(placement)}; CPUs for each: {placement.cpus:g} to train, {placement.data_cpus:.3g} to read images"


def workers(placement: Placement) -> str:
    """Their number and what they train on, as a person reads it."""
    return f"{placement.num_workers} {'worker' if placement.num_workers == 1 else 'workers'} on {placement.device}"


def cpus(number: float) -> str:
    """A number of CPUs, as a person reads it."""
    return f"{number:g} {'CPU' if number == 1 else 'CPUs'}"


def _shown_troubles(report: DoctorReport) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for mark, style, troubles in (("✗", "red", report.failures), ("!", "yellow", report.warnings)):
        for trouble in troubles:
            grid.add_row(Text(mark, style), Text(_where(trouble, len(report.nodes)) + trouble.sentence))
    if report.ok:
        grid.add_row(Text("✓", "green"), "Nothing stands in the way.")
    return grid


def _where(trouble: Finding, num_nodes: int) -> str:
    named, num_more = trouble.nodes[:_NODES_NAMED], len(trouble.nodes) - _NODES_NAMED
    if not named or num_nodes == 1:
        return ""
    if len(trouble.nodes) == num_nodes:
        return f"All {num_nodes} nodes: "
    return ", ".join(named) + (f" and {num_more} more" if num_more > 0 else "") + ": "


def size(num_bytes: int) -> str:
    """A number of bytes, as a person reads it."""
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 100e9 else f"{num_bytes / 1e9:,.1f} GB"
