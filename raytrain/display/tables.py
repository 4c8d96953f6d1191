"""What the commands print: tables, the page of a run, and the way on from where it stopped."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.config import TrainConfig
from raytrain.display.terminal import STATUS_STYLES, curves, duration, run_curves
from raytrain.experiments.compare import comparison as compared
from raytrain.recipes import RECIPES
from raytrain.runs.records import RunInfo, RunRecord, RunStatus

_SKIPPED_SHOWN = 5
_FAULTS = ("missing", "doubled", "misplaced")
_FAULTS_SHOWN = 10
_CLASSES_SHOWN = 20
_BAR_WIDTH = 16
RUN_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
_COMPARED = {
    "status": ("status", "{}"),
    "steps": ("steps", "{:,}"),
    "epochs": ("epochs", "{:g}"),
    "test_accuracy": ("test accuracy", "{:.4f}"),
    "test_loss": ("test loss", "{:.4f}"),
    "loss": ("training loss", "{:.4f}"),
    "images_per_s": ("images/s", "{:,.0f}"),
    "seconds": ("seconds", "{:,.0f}"),
    "skipped": ("skipped", "{:,}"),
}


def facts(values: Mapping[str, Any]) -> RenderableType:
    """Names and plain values, a line each; what is not known is left out, and lists and tables are left to ``--json``."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for name, value in values.items():
        if value is not None and not isinstance(value, (list, tuple, dict)):
            grid.add_row(name.removeprefix("num_").replace("_", " "), _shown(value))
    return grid


def train_outcome(config: TrainConfig, summary: Mapping[str, Any]) -> RenderableType:
    """How a run ended and, where there is more to train, how to go on."""
    lines: list[RenderableType] = [facts(summary)]
    if summary["status"] != "finished":
        command = command_line(dataclasses.replace(config, name=summary["name"]))
        lines += [Text(), Text.assemble("Go on with  ", (f"{command} --resume", "bold"), overflow="fold")]
    return Group(*lines)


def command_line(config: TrainConfig) -> str:
    """The command that trains with these options: the recipe, and the flags of what differs from it.

    Options that were put together in Python belong to no recipe; then it is the flags alone.
    """
    command = ["raytrain", "train", config.recipe] if config.recipe in RECIPES else []
    return shlex.join([*command, *_flags(config)])


def runs_table(runs: Sequence[RunInfo], storage: str) -> RenderableType:
    """The list of runs."""
    if not runs:
        return Text(f"There are no runs in {storage} yet; `raytrain demo` makes one.")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "recipe", "status"):
        table.add_column(heading, vertical="bottom", no_wrap=True)
    for heading in ("epoch", "step", "test\naccuracy", "heard of"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for run in runs:
        status = run.status
        table.add_row(
            run.name,
            run.recipe,
            Text(status.status, style=STATUS_STYLES.get(status.status, "red")),
            f"{status.epoch}/{status.num_epochs}",
            f"{status.step:,}/{status.num_steps:,}",
            _shown(run.test_accuracy),
            _local(datetime.fromisoformat(status.heartbeat_at)) if status.heartbeat_at else "–",
        )
    return table


def run_line(run: RunInfo) -> dict[str, Any]:
    """One run of the list, for ``--json``."""
    return {"name": run.name, "recipe": run.recipe, **dataclasses.asdict(run.status), "test_accuracy": run.test_accuracy}


def run_page(record: RunRecord) -> RenderableType:
    """All about one run."""
    parts: list[RenderableType] = [_title(record.name, record.status)]
    parts += [Text(command_line(record.config), style="dim", overflow="fold")]
    if record.metrics:
        parts += [Text(heading(record), style="bold"), curves(record.metrics)]
    if record.summary:
        parts += [facts(record.summary)]
    if record.checkpoints:
        parts += [_checkpoints(record)]
    if record.skipped:
        parts += [_skipped(record)]
    return Group(*(Group(part, Text()) for part in parts))


def audit_page(result: Mapping[str, Any]) -> RenderableType:
    """What an audit found, epoch by epoch, and its verdict."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("epoch", "planned", "used_once", "unreadable", *_FAULTS):
        table.add_column(name.replace("_", " "), justify="right")
    for epoch in result["epochs"]:
        counts = [epoch[name] for name in ("epoch", "planned", "used_once", "unreadable")]
        table.add_row(*map(_shown, counts), *(_shown(len(epoch[fault])) for fault in _FAULTS))
    steps = f"steps {result['first_step']:,} to {result['last_step']:,}"
    if result["clean"]:
        return Group(table, Text(f"Each readable sample was used exactly once an epoch, in its step ({steps}).", style="green"))
    faults = [f"  {fault} in epoch {epoch['epoch']}: {key}" for epoch in result["epochs"] for fault in _FAULTS for key in epoch[fault]]
    more = [f"  and {len(faults) - _FAULTS_SHOWN:,} more; --json lists them all"] if len(faults) > _FAULTS_SHOWN else []
    verdict = Text(f"Not each sample was used exactly once an epoch ({steps}):", style="red")
    return Group(table, verdict, *map(Text, faults[:_FAULTS_SHOWN] + more))


def heading(record: RunRecord) -> str:
    """The title over a run's curves: epoch and time elapsed, as the last row of its history has them."""
    last = record.metrics[-1]
    return f"Epoch: {last['epoch']}, Elapsed: {duration(last['elapsed_s'])}"


def run_document(record: RunRecord) -> dict[str, Any]:
    """All about one run, for ``--json``."""
    return {
        "name": record.name,
        "config": dataclasses.asdict(record.config),
        "status": dataclasses.asdict(record.status),
        "summary": record.summary,
        "metrics": record.metrics,
        "checkpoints": [{"path": c.path, "size_bytes": c.size_bytes, "modified": c.modified} for c in record.checkpoints],
        "skipped": record.skipped,
    }


def evaluation(result: Mapping[str, Any]) -> RenderableType:
    """What an evaluation found: the figures, the classes from the worst on, and the most frequent confusions."""
    return Group(facts(result), Text(), Columns([_classes(result["per_class"]), _confusions(result)], padding=(0, 4)))


def comparison(records: Sequence[RunRecord]) -> RenderableType:
    """Runs side by side, each in a colour: the options that differ, how far and how well each went, and the curves of all."""
    rows = compared(records)
    styles = [RUN_STYLES[number % len(RUN_STYLES)] for number in range(len(rows))]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(style="dim")
    for row, style in zip(rows, styles, strict=True):
        table.add_column(Text(row["name"], style=style), justify="right", overflow="fold")
    for option in rows[0]["options"]:
        table.add_row(option.replace("_", " "), *(Text(_setting(row["options"][option])) for row in rows))
    table.add_section()
    for figure, (label, form) in _COMPARED.items():
        table.add_row(label, *("–" if row[figure] is None else form.format(row[figure]) for row in rows))
    named = {record.name: (style, record.metrics) for record, style in zip(records, styles, strict=True)}
    return Group(table, run_curves(named), Text())


def _flags(config: TrainConfig) -> list[str]:
    recipe = RECIPES.get(config.recipe)
    usual = vars(recipe()) if recipe else {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    words: list[str] = []
    for name, value in vars(config).items():
        if value != usual[name] and value is not None and name not in ("recipe", "resume"):
            words += _flag(name.replace("_", "-"), value)
    return words


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
    return [f"--{name}", *map(str, values)]


def _setting(value: Any) -> str:
    """An option as one would type it."""
    values = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
    return " ".join("–" if one is None else f"{one:g}" if isinstance(one, float) else str(one) for one in values)


def _title(name: str, status: RunStatus) -> Text:
    where = f" at step {status.step:,}/{status.num_steps:,}, epoch {status.epoch}/{status.num_epochs}" if status.num_steps else ""
    return Text.assemble((name, "bold"), "  ", (status.status, STATUS_STYLES.get(status.status, "red")), where)


def _checkpoints(record: RunRecord) -> RenderableType:
    table = Table("checkpoint", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("size", justify="right")
    table.add_column("written")
    for stored in record.checkpoints:
        table.add_row(stored.path, f"{stored.size_bytes / 1e6:,.1f} MB", _local(stored.modified))
    return table


def _skipped(record: RunRecord) -> RenderableType:
    shown, num_more = record.skipped[:_SKIPPED_SHOWN], len(record.skipped) - _SKIPPED_SHOWN
    lines = [f"{row['key']}: {row['reason']}" for row in shown] + ([f"and {num_more:,} more in skipped.jsonl"] if num_more > 0 else [])
    images = "1 image" if len(record.skipped) == 1 else f"{len(record.skipped):,} images"
    return Group(Text(f"{images} skipped", style="yellow"), *(Text(f"  {line}") for line in lines))


def _classes(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "right", "accuracy"):
        table.add_column(name, justify="right")
    table.add_column(width=_BAR_WIDTH)
    worst_first = sorted(rows, key=lambda row: math.inf if row["accuracy"] is None else row["accuracy"])
    for row in worst_first[:_CLASSES_SHOWN]:
        bar = Bar(1, 0, row["accuracy"] or 0, width=_BAR_WIDTH, color="cyan")
        table.add_row(Text(row["class"]), f"{row['images']:,}", f"{row['right']:,}", _shown(row["accuracy"]), bar)
    num_more = len(rows) - _CLASSES_SHOWN
    return Group(table, Text(f" and {num_more:,} better ones, which --json lists", style="dim")) if num_more > 0 else table


def _confusions(result: Mapping[str, Any]) -> RenderableType:
    if not result["confusions"]:
        return Text("\nNo image was taken for another class.")
    table = Table("true class", "taken for", box=box.SIMPLE_HEAD)
    table.add_column("images", justify="right")
    table.add_column("of the class", justify="right")
    sizes = {row["class"]: row["images"] for row in result["per_class"]}
    for row in result["confusions"]:
        table.add_row(Text(row["truth"]), Text(row["answer"]), f"{row['images']:,}", f"{row['images'] / sizes[row['truth']]:.1%}")
    return table


def _local(time: datetime) -> str:
    return f"{time.astimezone():%b %d %H:%M}"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        form = ".1e" if 0 < abs(value) < 1e-4 else ".4f" if abs(value) < 10 else ",.1f"
        return f"{value:{form}}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
