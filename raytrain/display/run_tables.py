"""Runs as tables: the list, one run's page, several runs side by side, and runs as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from raytrain.data.labels.listing import lost_files
from raytrain.display.console import (
    UNKNOWN,
    add_row,
    format_duration,
    format_option,
    format_optional,
    format_time,
    format_value,
    headed_table,
    key_value_table,
    metric_label,
    run_styles,
    status_style,
)
from raytrain.display.curves import comparison_plots, curve_heading, curve_plots, side_by_side
from raytrain.display.event_text import shown_summary
from raytrain.display.result_page import command_line, is_resumed
from raytrain.errors import format_count, format_dollars, shell_command
from raytrain.experiments.compare import SortKey, compare_records, last_row
from raytrain.experiments.sweep_plan import parse_sweep, sweep_command
from raytrain.runs.documents import plain
from raytrain.runs.metric_row import own_metrics
from raytrain.runs.outcome import train_command
from raytrain.runs.records import RunInfo, RunRecord
from raytrain.runs.redact import one_line

LISTED_OPTIONS = ("model", "loop", "epochs", "learning_rate", "schedule", "batch_size", "optimizer")  # of each run
_NUM_FILES_SHOWN = 20
_NUM_SKIPPED_SHOWN = 5
_LEFT = ("name", "trial", "recipe", "status", "tags")  # columns of words, which are aligned to the left
_NAMES = ("name", "trial")
_MIN_WRAPPED = 12  # characters: a column that is wrapped stays as wide, so that numbers are in one line
_LESS_IMPORTANT = ("time", "step", "tags", "recipe", "heartbeat", "epoch", "last\naccuracy")
"""Columns that are left out if there is no room, the first one first."""
_WIDE = 1000  # characters: wider than any table
_MAX_HEADINGS = 44  # characters: longer names, all together, do not fit into 80 columns
_RESULTS = {
    "status": ("status", ""),
    "steps": ("steps", ","),
    "epochs": ("epochs", "g"),
    "validation_accuracy": ("last accuracy", ".4f"),
    "validation_loss": ("last loss", ".4f"),
    "loss": ("training loss", ".4f"),
    "images_per_s": ("images/s", ",.0f"),
    "seconds": ("seconds in all", ",.0f"),
    "skipped": ("skipped", ","),
}
"""Labels and formats of the results in a comparison, by the fields of a compared run."""

Column = tuple[str | Text, Sequence[str] | Sequence[Text]]
"""A heading, and the cells below it."""


def runs_table(
    runs: Sequence[RunInfo], storage: str, *, filtered: bool = False, sorted_by: SortKey = "heartbeat"
) -> RenderableType:
    """Return the list of ``runs``, and problems with their documents; ``filtered`` says that there may be other runs.

    ``storage`` is named if there are no runs. The column that runs are ``sorted_by`` is shown however narrow the screen
    is.
    """
    if not runs:
        return Text(
            f"No run in {storage} matches --filter."
            if filtered
            else f"There are no runs in {storage}; `raytrain demo` trains one."
        )

    # A column for each fact; tags have one only if there are any.
    statuses = [run.status for run in runs]
    columns: list[Column] = [
        ("name", [run.name for run in runs]),
        ("recipe", [run.recipe for run in runs]),
        ("status", [status_text(status.status) for status in statuses]),
        (
            "epoch",
            [f"{status.epoch}/{status.num_epochs}" if status.num_epochs else UNKNOWN for status in statuses],
        ),
        ("step", [f"{status.step:,}/{status.num_steps:,}" for status in statuses]),
        *_best_column(runs),
        ("last\naccuracy", [format_value(run.validation_accuracy) for run in runs]),
        *column_if_known("time", [run.seconds for run in runs], format_duration),
        *column_if_known("cost", [status.dollars for status in statuses], format_dollars),
        ("heartbeat", [format_time(status.heartbeat) if status.heartbeat else UNKNOWN for status in statuses]),
    ]
    if any(run.tags for run in runs):
        columns.append((Text("tags"), [" ".join(run.tags) for run in runs]))

    # The table. The word to sort by is also the heading of the column that must stay, but for the accuracy.
    keep = "last\naccuracy" if sorted_by == "accuracy" else sorted_by
    parts: list[RenderableType] = [FittingTable(columns, keep)]

    # If the runs are sorted by their best values, and these are of different metrics, a line says that they cannot be
    # compared.
    metrics = sorted({metric_label(run.best_metric) for run in runs if run.best_value is not None})
    if sorted_by == "best" and len(metrics) > 1:
        several = f"The runs have several metrics of --best, which do not compare: {', '.join(metrics)}."
        parts.append(Text(f"{several} Those of each stand together, the best first."))
    return Group(*parts, *(problem_lines(run.name, run.problems) for run in runs if run.problems))


def column_if_known(heading: str, values: Sequence[float | None], text: Callable[[float], str]) -> list[Column]:
    """Return a column of ``values`` as ``text``, with a dash for None; no column if none of them is known."""
    if all(value is None for value in values):
        return []
    return [(heading, [UNKNOWN if value is None else text(value) for value in values])]


def _best_column(runs: Sequence[RunInfo]) -> list[Column]:
    """Return the column of the best values, each by the run's own --best; no column if no summary has one."""
    if all(run.best_value is None for run in runs):
        return []

    # A common metric is named in the heading, different ones beside the values.
    names = {run.best_metric for run in runs if run.best_value is not None}
    if len(names) == 1:
        return [(f"best\n{metric_label(*names)}", [format_value(run.best_value) for run in runs])]
    values = [
        UNKNOWN if run.best_value is None else f"{metric_label(run.best_metric)} {format_value(run.best_value)}"
        for run in runs
    ]
    return [("best", values)]


class FittingTable:
    """A table that leaves out its less important columns if the screen has no room for all.

    The column with the heading ``keep`` is never left out.
    """

    def __init__(self, columns: Sequence[Column], keep: str = "") -> None:
        self._columns = columns
        self._keep = keep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with as many columns as there is room for; rich calls this method to print the object."""
        columns = list(self._columns)
        for name in (name for name in _LESS_IMPORTANT if name != self._keep):
            # Measured on a very wide screen, the table says how wide it would be without wrapped or cut cells.
            if console.measure(rows_table(*columns), options=options.update(width=_WIDE)).maximum <= options.max_width:
                break
            columns = [(heading, cells) for heading, cells in columns if str(heading) != name]
        yield rows_table(*columns)


def rows_table(*columns: Column) -> Table:
    """Return a table of ``columns``, with a row for each run or trial.

    On a narrow screen, the names of runs are wrapped, and columns whose heading is a Text; all others stay as wide as
    their cells. A name must not be cut: those of a project often differ in their ends alone.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading, cells in columns:
        may_wrap = isinstance(heading, Text) or heading in _NAMES
        table.add_column(
            heading,
            justify="left" if str(heading) in _LEFT else "right",
            vertical="bottom",
            min_width=min(max(map(len, cells), default=0), _MIN_WRAPPED) if may_wrap else None,
            no_wrap=not may_wrap,
            overflow="fold" if may_wrap else "ellipsis",
        )
    for row in zip(*(cells for _, cells in columns), strict=True):
        add_row(table, *row)
    return table


def status_text(status: str) -> Text:
    """Return the status of a run in its colour."""
    return Text(one_line(status), style=status_style(status))


def problem_lines(name: str, problems: Sequence[str]) -> RenderableType:
    """Return a line for each of the ``problems`` of a run: documents, or parts of them, that cannot be used."""
    return Group(*(Text(one_line(f"! {name}: {problem}"), style="yellow") for problem in problems))


def run_page(record: RunRecord) -> RenderableType:
    """Return everything that is known about one run, in parts with a blank line after each."""
    # The name and status, and the command that trained it.
    status = record.status
    progress = f" at step {status.step:,}/{status.num_steps:,}"
    progress += f", epoch {status.epoch}/{status.num_epochs}" if status.num_epochs else ""
    title = Text.assemble((record.name, "bold"), "  ", status_text(status.status), progress if status.num_steps else "")
    parts: list[RenderableType] = [title]
    sweep = parse_sweep(record.sweep) if record.sweep else None
    if record.config:
        command = sweep_command(sweep, record.config) if sweep else train_command(record.config)
        parts.append(Text(one_line(command), style="dim"))
    if sweep and record.config:
        compare = shell_command("compare", record.name, storage=record.config.storage)
        heading = Text(f"A sweep of {format_count(sweep.num_trials, 'trial')}. Those that have begun are shown by")
        parts.append(Group(heading, command_line(compare)))
    if record.problems:
        parts.append(problem_lines(record.name, record.problems))

    # The images.
    if counts := record.images:
        numbers = {part: counts[part] for part in ("training", "validation", "test")}
        images = ", ".join(f"{count:,} for {part}" for part, count in numbers.items() if count)
        parts.append(key_value_table({"images": images, "left out": lost_files(counts["left_out"]) or None}))

    # The provenance of the first attempt, and of each later one that differs from the one before it.
    if record.provenance:
        first, *later = record.provenance
        rows = {"made of": first.summary()}
        for before, attempt in zip(record.provenance, later, strict=False):
            # An attempt with another command alone is made of the same.
            if changes := attempt.difference_from(before):
                rows[f"after step {attempt.first_step:,}"] = changes
        parts.append(key_value_table(rows))

    # The curves, and the last values of the metrics that a user's loop logs.
    if record.metrics:
        last = record.metrics[-1]
        parts += [Text(curve_heading(last.epoch, record.elapsed_s), style="bold"), curve_plots(record.metrics)]
        loop_metrics = own_metrics(last_row(record.metrics, "step"), last_row(record.metrics, "evaluation"))
        if loop_metrics:
            parts.append(key_value_table(loop_metrics))

    # The result; a summary with another status is of an earlier attempt.
    if record.summary and record.summary.get("status") == status.status:
        parts.append(key_value_table(_rows_of_summary(record.summary)))

    # The checkpoints, the newest files of the loop's own, and the first images that could not be used.
    newest = sorted(record.files, key=lambda file: file.modified)[-_NUM_FILES_SHOWN:]
    more = f" (the newest {len(newest)} of {len(record.files):,})" if len(newest) < len(record.files) else ""
    for heading, files in (("checkpoint", record.checkpoints), (f"file of the loop{more}", newest)):
        rows = [(file.path, decimal(file.size_bytes), format_time(file.modified)) for file in files]
        if rows:
            parts.append(headed_table([heading], ("size", "written"), rows))
    if record.skipped:
        lines = [f"{image.key}: {image.reason}" for image in record.skipped[:_NUM_SKIPPED_SHOWN]]
        if num_more := len(record.skipped) - len(lines):
            lines.append(f"and {num_more:,} more in skipped.jsonl")
        heading = Text(f"{format_count(len(record.skipped), 'image')} skipped", style="yellow")
        parts.append(Group(heading, *(Text(f"  {one_line(line)}") for line in lines)))

    return Group(*(Group(part, Text()) for part in parts))


def _rows_of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a table of a run's summary, without numbers that only some runs have."""
    rows = shown_summary(summary)
    if not rows.get("num_decoded_on_cpu"):  # 0 would be wrong: without a GPU that decodes, CPUs decode all images
        rows.pop("num_decoded_on_cpu", None)
    if not is_resumed(rows.get("seconds"), rows.get("total_seconds")):
        rows.pop("total_seconds", None)
    return rows


def comparison_page(records: Sequence[RunRecord]) -> RenderableType:
    """Return the options that differ, the results and the curves of several runs, each in a colour of its own.

    Below them are problems with the runs' documents.
    """
    runs = compare_records(records)
    names, styles = [run.name for run in runs], run_styles(runs)

    # If the names are too long for headings, letters replace them, with a legend above the table.
    labels, legend = names, list[Text]()
    if sum(map(len, names)) > _MAX_HEADINGS:
        labels = [_letter(number) for number in range(len(names))]
        for label, name, style in zip(labels, names, styles, strict=True):
            legend.append(Text.assemble((f"  {label:<2} ", style), one_line(name)))

    # A column for each run: first the options, then the results, then metrics that users' loops log.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # six runs fit into 80 columns
    table.add_column(style="dim")
    for label, style in zip(labels, styles, strict=True):
        table.add_column(Text(label, style=style), justify="right", overflow="fold")
    for option in runs[0].options:
        add_row(table, option.replace("_", " "), *(format_option(run.options[option]) for run in runs))
    table.add_section()

    # A common metric of --best is named beside the row, different ones beside the values.
    best_metrics = {run.best_metric for run in runs}
    best_values = [format_value(run.best_value) for run in runs]
    if len(best_metrics) == 1:
        add_row(table, f"best {metric_label(*best_metrics)}", *best_values)
    else:
        names_of_metrics = [metric_label(run.best_metric) for run in runs]
        values = (f"{name} {value}" for name, value in zip(names_of_metrics, best_values, strict=True))
        add_row(table, "best", *values)
    for name, (label, spec) in _RESULTS.items():
        add_row(table, label, *(format_optional(getattr(run, name), spec) for run in runs))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        add_row(table, name, *(format_value(run.metrics.get(name)) for run in runs))

    problems = (problem_lines(record.name, record.problems) for record in records if record.problems)
    return Group(*legend, table, *problems, side_by_side(*comparison_plots(records, labels)), Text())


def _letter(number: int) -> str:
    """Return the name of a column by its number: A, B, … Z, AA, AB, …"""
    return ("" if number < 26 else _letter(number // 26 - 1)) + chr(ord("A") + number % 26)


def run_info_json(run: RunInfo) -> dict[str, Any]:
    """Return one run of the list as plain values: its status, results, and those of its options that lists show.

    Options that the run's own loop does not use are None.
    """
    options = {name: getattr(run.config, name, None) for name in LISTED_OPTIONS if name not in run.unused_options}
    options = dict.fromkeys(LISTED_OPTIONS) | options
    return plain(
        {
            "name": run.name,
            "recipe": run.recipe,
            **dataclasses.asdict(run.status),
            **options,
            "best_metric": run.best_metric,
            "best_value": run.best_value,
            "validation_accuracy": run.validation_accuracy,
            "seconds": run.seconds,
            "tags": run.tags,
            "note": run.config and run.config.note,
            "problems": run.problems,
        }
    )


def run_record_json(record: RunRecord) -> dict[str, Any]:
    """Return all documents of one run, which :class:`RunRecord` describes, as plain values."""
    metrics = [row.to_json() for row in record.metrics]
    return plain({**vars(record), "metrics": metrics})
