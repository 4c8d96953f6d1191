"""Runs side by side: options, results and curves."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.console import run_styles
from raytrain.display.curves import comparison_plots
from raytrain.display.formatting import UNKNOWN, format_option
from raytrain.display.run_tables import problem_lines
from raytrain.experiments.compare import compare_records
from raytrain.runs.records import RunRecord
from raytrain.runs.redact import one_line

_MAX_HEADINGS = 44
"""Characters of all names together that 80 columns have room for."""
_RESULTS = {
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


def comparison_page(records: Sequence[RunRecord]) -> RenderableType:
    """The options that differ, the results, and the curves of all runs, each run in its colour.

    Names that are too long for headings are listed above, with the letters that stand for them.
    """
    runs = compare_records(records)
    names, styles = [run.name for run in runs], run_styles(runs)
    labels = names if sum(map(len, names)) <= _MAX_HEADINGS else [_letter(number) for number in range(len(names))]
    legend = [] if labels is names else [Text(), *map(_legend_line, labels, names, styles)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # six runs fit into 80 columns
    table.add_column(style="dim")
    for label, style in zip(labels, styles, strict=True):
        table.add_column(Text(label, style=style), justify="right", overflow="fold")
    for option in runs[0].options:
        table.add_row(option.replace("_", " "), *(Text(format_option(run.options[option])) for run in runs))
    table.add_section()
    for name, (label, text) in _RESULTS.items():
        table.add_row(label, *(_text(getattr(run, name), text) for run in runs))
    problems = (problem_lines(record.name, record.problems) for record in records if record.problems)
    return Group(*legend, table, *problems, comparison_plots(records, labels), Text())


def _letter(number: int) -> str:
    """A, B, … Z, AA, AB, …"""
    return ("" if number < 26 else _letter(number // 26 - 1)) + chr(ord("A") + number % 26)


def _legend_line(label: str, name: str, style: str) -> Text:
    return Text.assemble((f"  {label:<2} ", style), one_line(name), overflow="fold")


def _text(value: object, text: str) -> str:
    return UNKNOWN if value is None else one_line(text.format(value))
