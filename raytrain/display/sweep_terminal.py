"""A sweep in the terminal: a live table where there is a screen, a plain line for each piece of news where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.live_view import LiveView
from raytrain.display.terminal import STATUS_STYLES
from raytrain.experiments.sweep.results import SweepResult, TrialResult
from raytrain.experiments.sweep.search_space import flag_of
from raytrain.experiments.sweep.trials import Trial, as_typed, shown
from raytrain.runs.trial_status import WAITING, TrialStatus

_LINES_BESIDE_TRIALS = 6
_STATUSES = ("running", "finished", "stopped", "failed", WAITING)
_HINT = "Ctrl-C stops all with checkpoints, twice aborts"


class SweepTerminalView(LiveView):
    """Shows one sweep: ``with SweepTerminalView() as view``, then ``view.update(trials, standings)`` about twice a second.

    Args:
        console: where to; by default standard output. Its ``is_terminal`` decides between the live view and plain lines.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console, "looking at the data, starting the trials …")
        self._told: dict[str, tuple[str, int, float | None]] = {}

    def update(self, trials: Sequence[Trial], standings: Mapping[str, TrialStatus]) -> None:
        """Show how ``trials`` stand, those in ``standings`` that have begun."""
        if self._live is None:
            self._print_news(trials, standings)
        else:
            self._draw(live_table(trials, standings, self._console.height - _LINES_BESIDE_TRIALS), stays=False)

    def _print_news(self, trials: Sequence[Trial], standings: Mapping[str, TrialStatus]) -> None:
        for trial in trials:
            standing = standings.get(trial.name)
            if standing is None:
                continue
            news = (standing.status, standing.num_evaluations, standing.accuracy)
            if self._told.get(trial.name) != news:
                self._told[trial.name] = news
                self._console.print(plain_line(trial, standing), markup=False, highlight=False, soft_wrap=True)


def plain_line(trial: Trial, standing: TrialStatus) -> str:
    """How a trial stands, as one line of text."""
    parts = [trial.name, as_typed(trial.values), standing.status]
    if standing.num_epochs:
        parts.append(f"epoch {standing.epoch}/{standing.num_epochs}")
    if standing.loss is not None:
        parts.append(f"loss {standing.loss:.3f}")
    if standing.accuracy is not None:
        parts.append(f"best test accuracy {standing.accuracy:.4f}")
    if standing.images_per_s is not None and standing.status == "running":
        parts.append(f"{standing.images_per_s:,.0f} images/s")
    return "  ".join([*parts, *([f"({standing.reason})"] if standing.reason else [])])


def live_table(trials: Sequence[Trial], standings: Mapping[str, TrialStatus], num_rows: int) -> RenderableType:
    """The trials, those that train first where not all find room, and how many there are of each status."""
    table = _table(trials[0].values if trials else {}, ("status", "epoch", "loss", "best\naccuracy", "images/s"))
    standing_of = {trial.name: standings.get(trial.name, TrialStatus()) for trial in trials}
    best = max((standing.accuracy or 0.0 for standing in standing_of.values()), default=0.0)
    for trial in _most_telling(trials, standing_of, max(1, num_rows)):
        standing = standing_of[trial.name]
        table.add_row(
            trial.name,
            *map(shown, trial.values.values()),
            _status(standing.status),
            f"{standing.epoch}/{standing.num_epochs}" if standing.num_epochs else "–",
            _figure(standing.loss, ".3f"),
            _accuracy(standing.accuracy, best),
            _figure(standing.images_per_s if standing.status == "running" else None, ",.0f"),
        )
    return Group(table, Text(f" {_counts(standing_of)}    {_HINT}", style="dim", no_wrap=True, overflow="ellipsis"))


def results_table(result: SweepResult) -> RenderableType:
    """The trials from the best to the worst, and why some of them failed or stopped."""
    table = _table(result.trials[0].values, ("status", "last\nepoch", "best\naccuracy", "steps", "seconds"))
    best = max((trial.accuracy or 0.0 for trial in result.trials), default=0.0)
    for trial in result.trials:
        table.add_row(
            trial.name,
            *map(shown, trial.values.values()),
            _status(trial.status),
            str(trial.evaluations[-1][0]) if trial.evaluations else "–",
            _accuracy(trial.accuracy, best),
            f"{trial.steps:,}",
            f"{trial.seconds:,.0f}",
        )
    return Group(table, *(_reason(trial) for trial in result.trials if trial.reason), *_ways_on(result))


def _table(values: Mapping[str, object], figures: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("trial", vertical="bottom", no_wrap=True)
    for name in values:
        table.add_column(flag_of(name).replace("-", "-\n"), justify="right", vertical="bottom")
    for figure in figures:
        table.add_column(figure, justify="left" if figure == "status" else "right", vertical="bottom", no_wrap=True)
    return table


def _most_telling(trials: Sequence[Trial], standings: Mapping[str, TrialStatus], count: int) -> list[Trial]:
    """At most ``count`` trials, in their order: those that train, then those that are over, then those that wait."""

    def turn(trial: Trial) -> tuple[int, float]:
        standing = standings[trial.name]
        return {"running": 0, WAITING: 2}.get(standing.status, 1), -(standing.accuracy or 0.0)

    kept = {trial.name for trial in sorted(trials, key=turn)[:count]}
    return [trial for trial in trials if trial.name in kept]


def _counts(standings: Mapping[str, TrialStatus]) -> str:
    statuses = [standing.status for standing in standings.values()]
    return ", ".join(f"{statuses.count(status)} {status}" for status in _STATUSES if status in statuses)


def _status(status: str) -> Text:
    return Text(status, style="dim" if status == WAITING else STATUS_STYLES.get(status, "red"))


def _accuracy(accuracy: float | None, best: float) -> Text:
    return Text(_figure(accuracy, ".4f"), style="bold green" if accuracy and accuracy == best else "")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _reason(trial: TrialResult) -> Text:
    return Text.assemble(f" {trial.name} ", (trial.status, STATUS_STYLES.get(trial.status, "red")), f": {trial.reason}")


def _ways_on(result: SweepResult) -> list[Text]:
    lines = [Text()]
    if result.best is not None:
        lines.append(Text.assemble(" The best is ", (result.best, "bold"), f": {as_typed(result.trials[0].values)}"))
    if any(trial.status not in ("finished", "stopped") for trial in result.trials) or result.status == "stopped":
        lines.append(Text(f" Go on with what was stopped or failed: the same command with --name {result.name} --resume"))
    return lines
