"""The trials of a sweep as tables: while they train, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.event_text import reason_text
from raytrain.display.formatting import UNKNOWN, format_optional
from raytrain.display.styles import status_style
from raytrain.errors import option_name
from raytrain.experiments.sweep.results import SweepResult, TrialResult
from raytrain.experiments.sweep.trials import Trial, as_typed, shown
from raytrain.runs.printable import one_line
from raytrain.runs.trial_status import WAITING, TrialStatus

_STATUSES = ("running", "finished", "stopped", "failed", WAITING)
_HINT = "Ctrl-C stops all with checkpoints, twice aborts"


def live_table(trials: Sequence[Trial], statuses: Mapping[str, TrialStatus], num_rows: int) -> RenderableType:
    """At most ``num_rows`` trials, running ones before others, and how many trials have each status.

    ``statuses`` lacks the trials that have not started.
    """
    status_of = {trial.name: statuses.get(trial.name, TrialStatus()) for trial in trials}
    table = _trial_table(trials, ("status", "epoch", "loss", "best\naccuracy", "images/s"))
    best = max((status.accuracy or 0.0 for status in status_of.values()), default=0.0)
    for trial in _most_interesting(trials, status_of, max(1, num_rows)):
        status = status_of[trial.name]
        table.add_row(
            trial.name,
            *map(shown, trial.values.values()),
            _status_text(status.status),
            f"{status.epoch}/{status.num_epochs}" if status.num_epochs else UNKNOWN,
            format_optional(status.loss, ".3f"),
            _accuracy_text(status.accuracy, best),
            format_optional(status.images_per_s if status.status == "running" else None, ",.0f"),
        )
    return Group(table, Text(f" {_counts(status_of)}    {_HINT}", style="dim", no_wrap=True, overflow="ellipsis"))


def results_table(result: SweepResult) -> RenderableType:
    """The trials from the best to the worst, why some of them failed or stopped, and how to continue."""
    table = _trial_table(result.trials, ("status", "last\nepoch", "best\naccuracy", "steps", "seconds"))
    best = max((trial.accuracy or 0.0 for trial in result.trials), default=0.0)
    for trial in result.trials:
        table.add_row(
            trial.name,
            *map(shown, trial.values.values()),
            _status_text(trial.status),
            str(trial.evaluations[-1][0]) if trial.evaluations else UNKNOWN,
            _accuracy_text(trial.accuracy, best),
            f"{trial.steps:,}",
            f"{trial.seconds:,.0f}",
        )
    return Group(table, *(_reason(trial) for trial in result.trials if trial.reason), *_conclusion(result))


def _trial_table(trials: Sequence[Trial] | Sequence[TrialResult], columns: Sequence[str]) -> Table:
    """A table without rows: the trial, the varied options, and ``columns``.

    On a narrow screen, the headings of the options are wrapped, but no value is cut.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("trial", vertical="bottom", no_wrap=True)
    for name in trials[0].values if trials else ():
        heading = Text(option_name(name).replace("-", "-\n"), overflow="fold")
        longest = max(len(shown(trial.values[name])) for trial in trials)
        table.add_column(heading, justify="right", vertical="bottom", min_width=longest)
    for column in columns:
        justify = "left" if column == "status" else "right"
        table.add_column(column, justify=justify, vertical="bottom", no_wrap=True)
    return table


def _most_interesting(trials: Sequence[Trial], statuses: Mapping[str, TrialStatus], count: int) -> list[Trial]:
    """At most ``count`` trials, in their order: first running ones, then ended ones, then waiting ones."""

    def rank(trial: Trial) -> tuple[int, float]:
        status = statuses[trial.name]
        return {"running": 0, WAITING: 2}.get(status.status, 1), -(status.accuracy or 0.0)

    chosen = {trial.name for trial in sorted(trials, key=rank)[:count]}
    return [trial for trial in trials if trial.name in chosen]


def _counts(statuses: Mapping[str, TrialStatus]) -> str:
    names = [status.status for status in statuses.values()]
    return ", ".join(f"{names.count(name)} {name}" for name in _STATUSES if name in names)


def _status_text(status: str) -> Text:
    return Text(status, style="dim" if status == WAITING else status_style(status))


def _accuracy_text(accuracy: float | None, best: float) -> Text:
    return Text(format_optional(accuracy, ".4f"), style="bold green" if accuracy and accuracy == best else "")


def _reason(trial: TrialResult) -> Text:
    return Text.assemble(
        f" {trial.name} ", (trial.status, status_style(trial.status)), f": {one_line(str(reason_text(trial.reason)))}"
    )


def _conclusion(result: SweepResult) -> list[Text]:
    lines = [Text()]
    if result.best is not None:
        values = as_typed(result.trials[0].values)
        lines.append(Text.assemble(" The best is ", (result.best, "bold"), f": {values}"))
    if result.status == "stopped" or any(trial.status not in ("finished", "stopped") for trial in result.trials):
        lines.append(
            Text(f" Resume the stopped and failed trials: the same command with --name {result.name} --resume")
        )
    return lines
