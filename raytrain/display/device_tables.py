"""The devices of every node, by the numbers that ``--device`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.formatting import format_count, format_gigabytes

if TYPE_CHECKING:
    from raytrain.diagnostics.devices import Devices


def devices_page(devices: Devices) -> RenderableType:
    """A line for each device, and below them the problems that nodes reported."""
    table = Table("node", "device", "name", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("memory", "driver", "capability"):
        table.add_column(heading, justify="right")
    for node in devices.nodes:
        cpus = format_count(node.cpus, "CPU")
        table.add_row(f"{node.address} {node.id}", "CPU", cpus, format_gigabytes(node.memory_bytes), "", "")
        for number, gpu in enumerate(node.gpus):
            memory = format_gigabytes(gpu.memory_bytes) if gpu.memory_bytes else "shared"
            table.add_row("", f"GPU {number}", gpu.name, memory, gpu.driver, gpu.capability)
    problems = [Text(f"✗ {node.address}: {problem}", "red") for node in devices.nodes for problem in node.problems]
    return Group(table, *problems)
