"""Tables of audit, devices, doctor and profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.console import UNKNOWN, format_count, format_gigabytes, headed_table, key_value_table
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from raytrain.diagnostics.audit import AuditResult, EpochAudit
    from raytrain.diagnostics.doctor import DoctorReport, Finding
    from raytrain.diagnostics.network_probe import AllReduce
    from raytrain.diagnostics.node_probe import Node, NodeReport
    from raytrain.diagnostics.profile import ProfileResult
    from raytrain.launch.placement import Placement

_COUNTS = ("epoch", "planned", "used_once", "unreadable")
_FAULTS = ("missing", "doubled", "misplaced")
_NUM_FAULTS_SHOWN = 10


def audit_page(result: AuditResult) -> RenderableType:
    """The counts of each epoch and the verdict."""
    rows = [
        [f"{getattr(epoch, name):,}" for name in _COUNTS] + [f"{len(getattr(epoch, fault)):,}" for fault in _FAULTS]
        for epoch in result.epochs
    ]
    return Group(headed_table((), [name.replace("_", " ") for name in (*_COUNTS, *_FAULTS)], rows), *_verdict(result))


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


def devices_page(nodes: Sequence[Node]) -> RenderableType:
    """A line for each device, and below them the problems that nodes reported."""
    rows: list[tuple[str, ...]] = []
    for node in nodes:
        cpus, memory = format_count(node.cpus, "CPU"), format_gigabytes(node.memory_bytes)
        rows.append((f"{node.address} {node.id}", "CPU", cpus, memory, UNKNOWN, UNKNOWN))
        for number, gpu in enumerate(node.report.gpus if node.report else ()):
            memory = format_gigabytes(gpu.memory_bytes) if gpu.memory_bytes else "shared"
            rows.append(("", f"GPU {number}", gpu.name, memory, gpu.driver, gpu.capability))
    table = headed_table(("node", "device", "name"), ("memory", "driver", "capability"), rows)
    problems = [Text(f"✗ {node.address}: {problem}", "red") for node in nodes for problem in node.problems]
    return Group(table, *problems)


_NUM_NODES_NAMED = 3


def doctor_page(report: DoctorReport) -> RenderableType:
    """The whole page."""
    about = {
        "versions": " · ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items()),
        "data": report.data,
        "storage": report.storage,
        "--workers auto": report.placement and _placement_text(report.placement),
        "all-reduce": report.all_reduce and _all_reduce_text(report.all_reduce),
    }
    return Group(key_value_table(about), Text(), _about_nodes(report), _findings(report))


def _about_nodes(report: DoctorReport) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for node in report.nodes:
        grid.add_row(f"{node.address}\n{node.id}", Group(*_about_node(node, report.data is not None), Text()))
    return grid


def _about_node(node: Node, checks_data: bool) -> Iterator[Text]:
    """What a node has, how fast it reads the data, and whether it can write the storage: a line for each."""
    memory, store = format_gigabytes(node.memory_bytes), format_gigabytes(node.object_store_bytes)
    counts = f"{format_count(node.cpus, 'CPU')}, {format_count(node.gpus, 'GPU')}"
    yield Text(f"{counts}, {memory} of memory, {store} of object store")
    if (report := node.report) is None:
        yield Text("no answer", "red")
        return
    for gpu, count in Counter(report.gpus).items():
        memory = format_gigabytes(gpu.memory_bytes)
        yield Text(f"{count} × {gpu.name.removeprefix('NVIDIA ')}, {memory}, driver {gpu.driver}")
    yield Text(f"--precision auto: {report.precision}; free disk: {format_gigabytes(report.disk.free_bytes)}")
    if (found := report.interface) is not None:
        speed = f"{found.bits_per_s / 1e9:g} Gbit/s" if found.bits_per_s else "unknown speed"
        yield Text(f"network: {found.name}, {speed}")
    yield _read_speed_text(report, checks_data)
    yield Text("storage: written", "green") if report.writable else Text("storage: not written", "red")
    if report.identity:
        yield Text(f"credentials: {report.identity}")


def _read_speed_text(report: NodeReport, checks_data: bool) -> Text:
    speed = report.read_speed
    if speed is None:
        return Text("data: not read", "red") if checks_data else Text("data: not checked", "dim")
    rates = f"{speed.images_per_s:,.0f} images/s, {speed.bytes_per_s / 1e6:,.1f} MB/s"
    return Text(f"data: {rates}, listed in {speed.listing_s:.2f} s", "green")


def _placement_text(placement: Placement) -> str:
    workers = f"{format_count(placement.num_workers, 'worker')} on {placement.device}"
    return f"{workers}; CPUs for each: {placement.cpus:g} to train, {placement.data_cpus:.3g} to read images"


def _all_reduce_text(found: AllReduce) -> str:
    if found.bytes_per_s is None:
        return f"failed with {found.backend}"
    return f"{found.bytes_per_s / 1e6:,.0f} MB/s between {found.num_nodes} nodes with {found.backend}"


def _findings(report: DoctorReport) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for mark, style, findings in (("✗", "red", report.failures), ("!", "yellow", report.warnings)):
        for finding in findings:
            grid.add_row(Text(mark, style), Text(_which_nodes(finding, len(report.nodes)) + one_line(finding.sentence)))
    if report.ok:
        grid.add_row(Text("✓", "green"), "Nothing prevents training.")
    return grid


def _which_nodes(finding: Finding, num_nodes: int) -> str:
    named, num_more = finding.nodes[:_NUM_NODES_NAMED], len(finding.nodes) - _NUM_NODES_NAMED
    if not named or num_nodes == 1:
        return ""
    if len(finding.nodes) == num_nodes:
        return f"All {num_nodes} nodes: "
    return ", ".join(named) + (f" and {num_more} more" if num_more > 0 else "") + ": "


def profile_page(result: ProfileResult) -> RenderableType:
    """A line for each phase, the advice, and where the traces are."""
    table = headed_table(["phase"], ("ms", "share", "slowest worker"), ())
    for name, seconds in result.phases.items():
        times = [worker[name] for worker in result.workers]
        slowest = f"{1000 * max(times):,.1f} ms (worker {times.index(max(times))})"
        table.add_row(name, f"{1000 * seconds:,.1f}", f"{seconds / result.step_s:.0%}", slowest)
    table.add_section()
    table.add_row("a step", f"{1000 * result.step_s:,.1f}", "100%", "")
    traces = Text("Traces, for chrome://tracing or https://ui.perfetto.dev:\n  " + "\n  ".join(result.traces), "dim")
    return Group(table, Text(result.advice, "bold"), Text(), traces)
