"""Tables of audit, devices, doctor and profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.console import UNKNOWN, format_gigabytes, headed_table, key_value_table
from raytrain.errors import format_count
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from raytrain.diagnostics.audit import AuditResult
    from raytrain.diagnostics.doctor import DoctorReport, Finding
    from raytrain.diagnostics.node_probe import Node
    from raytrain.diagnostics.profile import ProfileResult

_COUNTS = ("epoch", "planned", "used_once", "unreadable")
_FAULTS = ("missing", "doubled", "misplaced")
_NUM_FAULTS_SHOWN = 10
_NUM_NODES_NAMED = 3  # in the sentence of a finding


def audit_page(result: AuditResult) -> RenderableType:
    """Return the counts of each epoch and the verdict, with the first faults if there are any."""
    rows = [
        [f"{getattr(epoch, name):,}" for name in _COUNTS] + [f"{len(getattr(epoch, fault)):,}" for fault in _FAULTS]
        for epoch in result.epochs
    ]
    counts = headed_table((), [name.replace("_", " ") for name in (*_COUNTS, *_FAULTS)], rows)

    # The verdict is one green sentence, or a red one with the samples that it is about.
    steps = f"steps {result.first_step:,} to {result.last_step:,}"
    if result.clean:
        verdict = Text(f"Every readable sample was used exactly once per epoch, in its step ({steps}).", style="green")
        return Group(counts, verdict)
    verdict = Text(f"Some samples were not used exactly once per epoch, in their step ({steps}):", style="red")
    faults = [
        Text(f"  {fault} in epoch {epoch.epoch}: {one_line(key)}")
        for epoch in result.epochs
        for fault in _FAULTS
        for key in getattr(epoch, fault)
    ]
    num_more = len(faults) - _NUM_FAULTS_SHOWN
    more = [Text(f"  and {num_more:,} more; --json lists them all")] if num_more > 0 else []
    return Group(counts, verdict, *faults[:_NUM_FAULTS_SHOWN], *more)


def devices_page(nodes: Sequence[Node]) -> RenderableType:
    """Return a line for each device, and below them the problems that nodes reported."""
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


def doctor_page(report: DoctorReport) -> RenderableType:
    """Return the whole page: the cluster, each of its nodes, and what prevents training or slows it down.

    Example: ``rich.print(doctor_page(diagnose("s3://bucket/train", "s3://bucket/runs", address=None)))``
    """
    # The cluster as a whole.
    placement, all_reduce = report.placement, report.all_reduce
    auto_workers = speed = None
    if placement is not None:
        cpus = f"{placement.cpus:g} to train, {placement.data_cpus:.3g} to read images"
        auto_workers = f"{format_count(placement.num_workers, 'worker')} on {placement.device}; CPUs for each: {cpus}"
    if all_reduce is not None:
        speed = f"failed with {all_reduce.backend}"
        if all_reduce.bytes_per_s is not None:
            rate = f"{all_reduce.bytes_per_s / 1e6:,.0f} MB/s"
            speed = f"{rate} between {all_reduce.num_nodes} nodes with {all_reduce.backend}"
    facts = {
        "versions": " · ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items()),
        "data": report.data,
        "storage": report.storage,
        "--workers auto": auto_workers,
        "all-reduce": speed,
    }

    # Each node: its addresses on the left, its lines on the right, and a blank line between two nodes.
    nodes = Table.grid(padding=(0, 2))
    for node in report.nodes:
        nodes.add_row(f"{node.address}\n{node.id}", Group(*_node_lines(node, report.data is not None), Text()))

    # The findings, with what to do. Each names the nodes that have it, unless there is only one node.
    findings = Table.grid(padding=(0, 1))
    for mark, style, group in (("✗", "red", report.failures), ("!", "yellow", report.warnings)):
        for finding in group:
            findings.add_row(Text(mark, style), Text(_names_of_nodes(finding, report) + one_line(finding.sentence)))
    if report.ok:
        findings.add_row(Text("✓", "green"), "Nothing prevents training.")

    return Group(key_value_table(facts), Text(), nodes, findings)


def _node_lines(node: Node, checks_data: bool) -> Iterator[Text]:
    """Yield the lines of a node: its hardware, how fast it reads the data, and whether it can write the storage.

    A node without a report has not answered. ``checks_data`` says whether it was asked to read data.
    """
    memory, object_store = format_gigabytes(node.memory_bytes), format_gigabytes(node.object_store_bytes)
    counts = f"{format_count(node.cpus, 'CPU')}, {format_count(node.gpus, 'GPU')}"
    yield Text(f"{counts}, {memory} of memory, {object_store} of object store")
    report = node.report
    if report is None:
        yield Text("no answer", "red")
        return

    # Machine: the GPUs of one type together, then the disk and the network.
    for gpu, count in Counter(report.gpus).items():
        memory = format_gigabytes(gpu.memory_bytes)
        yield Text(f"{count} × {gpu.name.removeprefix('NVIDIA ')}, {memory}, driver {gpu.driver}")
    yield Text(f"--precision auto: {report.precision}; free disk: {format_gigabytes(report.disk.free_bytes)}")
    if (interface := report.interface) is not None:
        bandwidth = f"{interface.bits_per_s / 1e9:g} Gbit/s" if interface.bits_per_s else "unknown speed"
        yield Text(f"network: {interface.name}, {bandwidth}")

    # Data and storage, with the credentials of this node.
    if (speed := report.read_speed) is not None:
        rates = f"{speed.images_per_s:,.0f} images/s, {speed.bytes_per_s / 1e6:,.1f} MB/s"
        yield Text(f"data: {rates}, listed in {speed.listing_s:.2f} s", "green")
    else:
        yield Text("data: not read", "red") if checks_data else Text("data: not checked", "dim")
    yield Text("storage: written", "green") if report.writable else Text("storage: not written", "red")
    if report.identity:
        yield Text(f"credentials: {report.identity}")


def _names_of_nodes(finding: Finding, report: DoctorReport) -> str:
    """Return the nodes that have a finding, as the beginning of its sentence; empty if it is about the cluster."""
    named, num_more = finding.nodes[:_NUM_NODES_NAMED], len(finding.nodes) - _NUM_NODES_NAMED
    if not named or len(report.nodes) == 1:
        return ""
    if len(finding.nodes) == len(report.nodes):
        return f"All {len(report.nodes)} nodes: "
    return ", ".join(named) + (f" and {num_more} more" if num_more > 0 else "") + ": "


def profile_page(result: ProfileResult) -> RenderableType:
    """Return a line for each phase of a step, the advice, and where the traces are."""
    table = headed_table(["phase"], ("ms", "share", "slowest worker"), ())
    for name, seconds in result.phases.items():
        times = [worker[name] for worker in result.workers]
        slowest = f"{1000 * max(times):,.1f} ms (worker {times.index(max(times))})"
        table.add_row(name, f"{1000 * seconds:,.1f}", f"{seconds / result.step_s:.0%}", slowest)
    table.add_section()
    table.add_row("a step", f"{1000 * result.step_s:,.1f}", "100%", "")
    traces = Text("Traces, for chrome://tracing or https://ui.perfetto.dev:\n  " + "\n  ".join(result.traces), "dim")
    return Group(table, Text(result.advice, "bold"), Text(), traces)
