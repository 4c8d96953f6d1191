"""Runs as tables: the list, a run's page and its log, runs side by side, and runs as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from raytrain.config import TrainConfig
from raytrain.config.user_code import names_own_function
from raytrain.data.labels.listing import lost_files
from raytrain.display.console import (
    UNKNOWN,
    format_count,
    format_duration,
    format_option,
    format_optional,
    format_time,
    format_value,
    headed_table,
    key_value_table,
    run_styles,
    status_style,
)
from raytrain.display.curves import comparison_plots, curve_heading, curve_plots
from raytrain.display.event_text import event_text, shown_summary
from raytrain.experiments.compare import compare_records, last_row
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import CHECKPOINTS, plain
from raytrain.runs.logs import StoredLog
from raytrain.runs.metric_row import own_metrics
from raytrain.runs.outcome import TrainResult, resume_command, shell_command, train_command
from raytrain.runs.records import RunInfo, RunRecord
from raytrain.runs.redact import one_line
from raytrain.runs.status import RunStatus

_NUM_SKIPPED_SHOWN = 5
_LEFT = ("name", "trial", "recipe", "status", "tags")  # columns of words
_LESS_IMPORTANT = ("step", "tags", "recipe", "heartbeat", "epoch")
_WIDE = 1000
_STREAMS = {"out": "standard output", "err": "standard error", "log": "output and log"}

Column = tuple[str | Text, Sequence[str] | Sequence[Text]]  # A heading, and the cells below it


def run_info_json(run: RunInfo) -> dict[str, Any]:
    """One run of the list."""
    status = dataclasses.asdict(run.status)
    return {
        "name": run.name,
        "recipe": run.recipe,
        **status,
        "test_accuracy": run.test_accuracy,
        "tags": run.tags,
        "note": run.config and run.config.note,
        "problems": run.problems,
    }


def run_record_json(record: RunRecord) -> dict[str, Any]:
    """Everything about one run."""
    metrics = [row.to_json() for row in record.metrics]
    return plain({**vars(record), "metrics": metrics})


def result_page(config: TrainConfig, result: TrainResult, best: tuple[float, str] | None = None) -> RenderableType:
    """How a run ended, and what to do next: resume it if it is not finished, and use it if it has a checkpoint.

    ``best`` are score and path of its best checkpoint.
    """
    lines: list[RenderableType] = [key_value_table(_result(config, result, best))]
    if result.status != "finished":
        command = resume_command(dataclasses.replace(config, name=result.name))
        lines += [Text("\nResume with"), command_line(command)]
    if best is not None and result.status != "failed":
        trust = any(map(names_own_function, (config.model, config.loop)))
        lines += [try_next(result.name, config.storage, trust=trust)]
    return Group(*lines)


def _result(config: TrainConfig, result: TrainResult, best: tuple[float, str] | None) -> dict[str, object]:
    measured = {"test accuracy": result.test_accuracy, "test loss": result.test_loss}
    last = ", ".join(f"{name} {value:.4f}" for name, value in measured.items() if value is not None)
    newest = "no checkpoint" if result.checkpoint is None else f"{CHECKPOINTS}{result.checkpoint.rpartition('/')[2]}"
    startup = f", of which {format_duration(result.startup_seconds)} to start" if result.startup_seconds else ""
    counts = {"step": result.steps, "epoch": round(result.epochs, 2), "image": result.samples_seen}
    steps = ", ".join(format_count(count, noun) for noun, count in counts.items())
    shown: dict[str, object] = {
        "name": result.name,
        "status": f"{result.status} after {steps} on {format_count(result.num_workers, 'worker')}",
        "time": format_duration(result.seconds) + startup,
        "last": newest + (f"; measured last: {last}" if last else ""),
    }
    if best is not None:
        score = f"; {config.best_metric.replace('_', ' ')} {abs(best[0]):.4f}" if math.isfinite(best[0]) else ""
        shown["best"] = f"{best[1]}, which the commands below use{score}"
    kept = ("num_skipped", "num_retries", "stop_reason", "error", "run_dir")
    rest = shown_summary(result.summary())
    return {**shown, **{name: rest[name] for name in kept if rest[name]}}


def try_next(name: str, storage: str, data: str | None = None, *, trust: bool = False) -> RenderableType:
    """Commands that use a run. ``data`` are images to test it on, by default its own.

    With ``trust`` they run code that the run names, which its author, who reads this, has written.
    """
    trusted = ["--trust"] if trust else []
    commands = (
        ["show", name],
        ["evaluate", name, *(["--data", data] if data else []), *trusted],
        ["predict", name, "--data", data or "IMAGES", "--output", "predictions.csv", *trusted],
        ["export", name, "--output", f"{name}.onnx", *trusted],
        ["serve", name, *trusted],
    )
    return Group(Text("\nTry next"), *(command_line(shell_command(*words, storage=storage)) for words in commands))


def command_line(command: str) -> Text:
    """A command below a sentence: one line however long it is, so that it can be copied."""
    return Text(f"  {one_line(command)}", style="bold", no_wrap=True, overflow="ignore")


def runs_table(runs: Sequence[RunInfo], storage: str, *, filtered: bool = False) -> RenderableType:
    """The list of runs; ``filtered`` says that others may be there."""
    if not runs:
        return Text(
            f"No run in {storage} matches --filter."
            if filtered
            else f"There are no runs in {storage}; `raytrain demo` trains one."
        )
    statuses = [run.status for run in runs]
    columns: list[Column] = [
        ("name", [one_line(run.name) for run in runs]),
        ("recipe", [one_line(run.recipe) for run in runs]),
        ("status", [status_text(status.status) for status in statuses]),
        ("epoch", [f"{status.epoch}/{status.num_epochs}" for status in statuses]),
        ("step", [f"{status.step:,}/{status.num_steps:,}" for status in statuses]),
        ("last\naccuracy", [format_value(run.test_accuracy) for run in runs]),
        ("heartbeat", [format_time(status.heartbeat) if status.heartbeat else UNKNOWN for status in statuses]),
    ]
    if any(run.tags for run in runs):
        columns.append((Text("tags"), [Text(one_line(" ".join(run.tags))) for run in runs]))
    return Group(FittingTable(columns), *(problem_lines(run.name, run.problems) for run in runs if run.problems))


class FittingTable:
    """A table without those of its columns that the screen has no room for, as far as they matter less."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich's protocol."""
        columns = list(self._columns)
        for name in _LESS_IMPORTANT:
            if console.measure(rows_table(*columns), options=options.update(width=_WIDE)).maximum <= options.max_width:
                break
            columns = [column for column in columns if str(column[0]) != name]
        yield rows_table(*columns)


def rows_table(*columns: Column) -> Table:
    """A table with a row for each run. A heading that is a Text is wrapped on a narrow screen, but no cell below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading, cells in columns:
        left = str(heading) in _LEFT
        wrapped = isinstance(heading, Text)
        table.add_column(
            heading,
            justify="left" if left else "right",
            vertical="bottom",
            min_width=max(map(len, cells), default=0) if wrapped and not left else None,
            no_wrap=not wrapped,
        )
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def status_text(status: str) -> Text:
    """The status of a run in its colour."""
    return Text(one_line(status), style=status_style(status))


def problem_lines(name: str, problems: Sequence[str]) -> RenderableType:
    """What of the documents of a run cannot be used."""
    return Group(*(Text(one_line(f"! {name}: {problem}"), style="yellow") for problem in problems))


def run_page(record: RunRecord) -> RenderableType:
    """Everything about one run."""
    parts: list[RenderableType] = [_title(record.name, record.status)]
    if record.config:
        parts += [Text(one_line(train_command(record.config)), style="dim", overflow="fold")]
    if record.problems:
        parts += [problem_lines(record.name, record.problems)]
    if record.images:
        parts += [key_value_table(_images(record.images))]
    if record.metrics:
        last = record.metrics[-1]
        parts += [Text(curve_heading(last.epoch, last.elapsed_s), style="bold"), curve_plots(record.metrics)]
        if own := own_metrics(*(last_row(record.metrics, kind) for kind in ("step", "evaluation"))):
            parts += [key_value_table(own)]
    if record.summary and record.summary.get("status") == record.status.status:  # else it is of an earlier attempt
        parts += [key_value_table(shown_summary(record.summary))]
    if record.checkpoints:
        parts += [_checkpoints(record)]
    if record.skipped:
        parts += [_skipped(record)]
    return Group(*(Group(part, Text()) for part in parts))


def _images(counts: Mapping[str, Any]) -> dict[str, object]:
    images = f"{counts['training']:,} for training, {counts['test']:,} for test"
    return {"images": images, "left out": lost_files(counts["left_out"]) or None}


def _title(name: str, status: RunStatus) -> Text:
    at = f" at step {status.step:,}/{status.num_steps:,}, epoch {status.epoch}/{status.num_epochs}"
    return Text.assemble(
        (name, "bold"), "  ", (one_line(status.status), status_style(status.status)), at if status.num_steps else ""
    )


def _checkpoints(record: RunRecord) -> RenderableType:
    rows = [(each.path, f"{each.size_bytes / 1e6:,.1f} MB", format_time(each.modified)) for each in record.checkpoints]
    return headed_table(["checkpoint"], ("size", "written"), rows)


def _skipped(record: RunRecord) -> RenderableType:
    lines = [f"{image.key}: {image.reason}" for image in record.skipped[:_NUM_SKIPPED_SHOWN]]
    num_more = len(record.skipped) - len(lines)
    if num_more:
        lines.append(f"and {num_more:,} more in skipped.jsonl")
    title = Text(f"{format_count(len(record.skipped), 'image')} skipped", style="yellow")
    return Group(title, *(Text(f"  {one_line(line)}") for line in lines))


class LogLines:
    """Prints the lines of logs that grow: each line once, below a heading that says whose it is."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._seen: dict[str, list[str]] = {}
        self._last = ""

    def events(self, snapshot: Snapshot) -> None:
        """Print what happened since the last call, with the seconds of training, and why the run failed."""
        lines = [f"{format_duration(at_s)}  {one_line(event_text(event))}" for _, at_s, event in snapshot.events]
        error = snapshot.result and snapshot.result.error
        self._print("", [*lines, one_line(error)] if error else lines)

    def printed(self, whose: str, logs: Sequence[StoredLog]) -> None:
        """Print what a process has printed since the last call, apart from a line that is still growing."""
        for log in logs:
            whole = log.text[: log.text.rfind("\n") + 1].replace("\r\n", "\n").split("\n")[:-1]
            shown = [one_line(line.rpartition("\r")[2]) for line in whole]  # a progress bar shows its last state
            self._print(f"== {whose}, started {log.started}, {_STREAMS[log.stream]}", shown)

    def _print(self, heading: str, lines: list[str]) -> None:
        new = lines[_num_seen(self._seen.get(heading, []), lines) :]
        if new and heading != self._last:
            self._write(heading)
            self._last = heading
        for line in new:
            self._write(line)
        self._seen[heading] = lines


def _num_seen(before: list[str], now: list[str]) -> int:
    """How many of the lines were there before; the oldest ones may have been dropped since."""
    for dropped in range(len(before)):
        if before[dropped:] == now[: len(before) - dropped]:
            return len(before) - dropped
    return 0


_MAX_HEADINGS = 44  # characters of all names together that 80 columns have room for
_RESULTS = {
    "status": ("status", ""),
    "steps": ("steps", ","),
    "epochs": ("epochs", "g"),
    "test_accuracy": ("last accuracy", ".4f"),
    "test_loss": ("last loss", ".4f"),
    "loss": ("training loss", ".4f"),
    "images_per_s": ("images/s", ",.0f"),
    "seconds": ("seconds", ",.0f"),
    "skipped": ("skipped", ","),
}


def comparison_page(records: Sequence[RunRecord]) -> RenderableType:
    """The options that differ, results and curves, each run in its colour, long names as letters."""
    runs = compare_records(records)
    names, styles = [run.name for run in runs], run_styles(runs)
    labels = names if sum(map(len, names)) <= _MAX_HEADINGS else [_letter(number) for number in range(len(names))]
    about = [] if labels is names else zip(labels, names, styles, strict=True)
    legend = [Text.assemble((f"  {label:<2} ", style), one_line(name), overflow="fold") for label, name, style in about]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # six runs fit into 80 columns
    table.add_column(style="dim")
    for label, style in zip(labels, styles, strict=True):
        table.add_column(Text(label, style=style), justify="right", overflow="fold")
    for option in runs[0].options:
        table.add_row(option.replace("_", " "), *(Text(format_option(run.options[option])) for run in runs))
    table.add_section()
    for name, (label, spec) in _RESULTS.items():
        table.add_row(label, *(one_line(format_optional(getattr(run, name), spec)) for run in runs))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        table.add_row(one_line(name), *(format_value(run.metrics.get(name)) for run in runs))
    problems = (problem_lines(record.name, record.problems) for record in records if record.problems)
    return Group(*legend, table, *problems, comparison_plots(records, labels), Text())


def _letter(number: int) -> str:
    """A, B, … Z, AA, AB, …"""
    return ("" if number < 26 else _letter(number // 26 - 1)) + chr(ord("A") + number % 26)
